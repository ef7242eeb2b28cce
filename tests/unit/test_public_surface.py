"""What the package promises at its top: names, errors, and what importing it costs."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import types

import pytest

import kvdata
import kvdata.datasets
import kvdata.errors
import kvdata.sdk


@pytest.mark.parametrize("module", [kvdata, kvdata.datasets, kvdata.sdk])
def test_all_lists_the_public_names(module):
    public = {n for n, v in vars(module).items() if not n.startswith("_") and not isinstance(v, types.ModuleType)}
    assert set(module.__all__) == public


def errors() -> list[type[Exception]]:
    found = [c for _, c in inspect.getmembers(kvdata.errors, inspect.isclass) if c.__module__ == "kvdata.errors"]
    assert len(found) > 15
    return found


@pytest.mark.parametrize("error", errors())
def test_every_error_is_a_kvcachesdkerror_made_of_one_string(error):
    made = error("what happened; what to do")
    assert isinstance(made, kvdata.KVCacheSDKError)
    assert str(made) == "what happened; what to do"
    assert str(pickle.loads(pickle.dumps(made))) == str(made)
    assert error.__doc__
    assert error.__name__ in kvdata.errors.__doc__


def test_importing_kvdata_imports_no_extra():
    """And never LMCache itself, which is only ever at the other end of the wire."""
    extras = "lightning transformers matplotlib typer uvicorn starlette scipy safetensors jinja2 plotly lmcache"
    code = f"import sys, kvdata; print([m for m in '{extras}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
