"""The other way round: LMCache's own SDK as a client of the embedded server, beside kvdata's."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdata.client.deadline import Deadline
from kvdata.client.rpc import Rpc
from tests.conformance.conftest import LAYOUT, fresh_tokens, random_kv
from tests.conftest import lmcache_commands
from tests.servers import installed_release

CLIENT = Path(__file__).with_name("upstream_sdk_client.py")

# On the real server LMCache's SDK reads the geometry that a serving engine registered; here it is a client's.
pytestmark = pytest.mark.embedded


@pytest.fixture
def upstream(request, server, tmp_path):
    """Run steps (see `CLIENT`) with LMCache's SDK on the server, and un-register it, which its own ``close`` omits."""
    pythons = [
        Path(command).parent / "python"
        for command in lmcache_commands(request.config)
        if installed_release(command) == server.release
    ]
    if not pythons:
        pytest.skip("needs --lmcache with the command of the release that the embedded server mimics")

    def run(model: str, *steps: Any) -> list[bool | None]:
        job = {"url": server.url, "http_url": server.http_url, "model": model, "steps": steps}
        (tmp_path / "job.json").write_text(json.dumps(job))
        command = [str(pythons[0]), str(CLIENT), str(tmp_path / "job.json")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert list(server.status()["non_cuda_context_meta"]) == [str(answer["instance_id"])]
        rpc = Rpc(server.url)
        rpc.call("unregister", answer["instance_id"], result=type(None), deadline=Deadline(10))
        rpc.close()
        return answer["results"]

    return run


@pytest.mark.parametrize("packing", ["split"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_clients_read_what_the_other_stored(upstream, connect, server, tmp_path, dtype, packing):
    layout, model = replace(LAYOUT, dtype=dtype, packing=packing), f"tests/upstream-{dtype}"
    tokens, salted, theirs, nobodys = (fresh_tokens(count) for count in (200, 128, 200, 128))
    ours = {"": random_kv(200, layout), "team-a": random_kv(128, layout)}
    written = {"": random_kv(200, layout), "team-b": random_kv(200, layout)}
    ctx = connect(layout, model)
    ctx.store(ours[""], tokens)
    ctx.store(ours["team-a"], salted, "team-a")
    ctx.close()  # the server remembers the layout
    file = {name: str(tmp_path / f"{name}.pt") for name in ("plain", "salted", "a", "b", "miss")}
    torch.save(written[""], file["a"])
    torch.save(written["team-b"], file["b"])
    results = upstream(
        model,
        ("retrieve", tokens, "", file["plain"]),
        ("retrieve", salted, "team-a", file["salted"]),
        ("retrieve", salted, "", file["miss"]),
        ("retrieve", nobodys, "", file["miss"]),
        ("store", theirs, "", file["a"]),
        ("store", theirs, "team-b", file["b"]),
    )
    assert results == [True, True, None, None, True, True]
    assert torch.equal(torch.load(file["plain"]), ours[""][:, :, :192])  # three whole chunks of 64
    assert torch.equal(torch.load(file["salted"]), ours["team-a"])
    named = connect(None, model)  # by the name alone, and not as if an engine had registered it
    assert [entry["model_name"] for entry in server.status()["non_cuda_context_meta"].values()] == [model]
    assert torch.equal(named.retrieve(theirs), written[""][:, :, :192])
    assert torch.equal(named.retrieve(theirs, "team-b"), written["team-b"][:, :, :192])
    assert named.retrieve(theirs, "team-a") is None


@pytest.mark.parametrize("packing", ["fused", "vllm-cpu"])
def test_no_other_packing_is_offered_to_its_sdk(connect, server, packing):
    """It would take the bytes for split ones."""
    model = f"tests/not-offered-{packing}"
    connect(replace(LAYOUT, packing=packing, block_size=32), model)
    assert model in server.status()["kvdata_layouts"]
    assert model not in server.status()["cache_context_meta"]
