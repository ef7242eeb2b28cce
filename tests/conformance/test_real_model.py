"""A real language model and real text through the server: what comes back is what the model computed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from kvdata import Connection, KVCacheDataset, Prefixes, collate
from kvdata.edits.address import compressed_address
from kvdata.edits.policies import KeyDiff, apply_policy
from kvdata.edits.rope import Rope
from kvdata.engines.huggingface import HuggingFaceEngine, to_dynamic_cache
from kvdata.engines.smollm2 import smollm2_folder
from kvdata.models.token_scorer import TokenScorer
from tests.command import kvdata

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def engine() -> HuggingFaceEngine:
    return HuggingFaceEngine.from_pretrained(smollm2_folder(), model_name="smollm2")


@pytest.fixture(scope="module")
def ingested(server, engine, tmp_path_factory) -> Path:
    """A prefix file whose prefixes `kvdata ingest` has put into the server."""
    texts = [topics["assignment"], topics["class"]]
    windows = Prefixes.from_text(texts, engine.tokenizer, 140, 20)[:2]
    path = tmp_path_factory.mktemp("ingest") / "prefixes.jsonl"
    windows.to_jsonl(path)
    done = kvdata("ingest", str(path), "--model", "smollm2", "--url", server.url, "--http-url", server.http_url)
    assert done.returncode == 0, done.stderr
    return path


def assert_same_cache(found: torch.Tensor, computed: torch.Tensor) -> None:
    """Equal up to rounding: ``kvdata ingest`` computes in bfloat16 where the CPU is fast in it, the engine in float32.

    As far apart as a serving engine's keys and a float32 forward's; a key at another place is off by tens of per cent.
    """
    assert found.shape == computed.shape
    for plane in (0, 1):
        for mine, theirs in zip(found[plane].float(), computed[plane].float(), strict=True):
            assert (mine - theirs).norm() / theirs.norm() < 4e-2


def test_a_retrieved_prefix_is_what_a_fresh_forward_computes(server, engine, ingested):
    prefixes = Prefixes.from_jsonl(ingested)
    assert (prefixes.layout, prefixes.model_name) == (engine.layout, "smollm2")
    dataset = KVCacheDataset(prefixes, server.url, server.http_url)
    batch = collate(dataset.__getitems__([0, 1]))
    dataset.close()
    for row, record in enumerate(prefixes):
        ids = torch.tensor(record.tokens[:128])[None]
        with torch.inference_mode():
            fresh = engine.model(input_ids=ids, use_cache=True).past_key_values
        keys = torch.stack([layer.keys[0].transpose(0, 1).flatten(1) for layer in fresh.layers])
        values = torch.stack([layer.values[0].transpose(0, 1).flatten(1) for layer in fresh.layers])
        assert_same_cache(batch.kv[row], torch.stack([keys, values]))


def test_the_model_goes_on_from_a_retrieved_cache_as_from_its_own(server, engine, ingested):
    prefixes = Prefixes.from_jsonl(ingested)
    with Connection(server.url, server.http_url, "smollm2", 20, prefixes.layout).connect() as ctx:
        kv = ctx.retrieve(prefixes[0].tokens)
    rest = torch.tensor(prefixes[0].tokens[128:])[None]
    with torch.inference_mode():
        whole = engine.model(input_ids=torch.tensor(prefixes[0].tokens)[None]).logits[:, 128:]
        continued = engine.model(input_ids=rest, cache=to_dynamic_cache(kv.float(), engine.layout)).logits
    assert (whole.argmax(-1) == continued.argmax(-1)).float().mean() > 0.9
    assert (continued.log_softmax(-1) - whole.log_softmax(-1)).abs().mean() < 0.05


@pytest.mark.embedded  # the real server publishes no geometry of a client's registration
def test_later_clients_of_the_embedded_server_need_the_name_alone(server, engine, ingested):
    with Connection(server.url, server.http_url, "smollm2", 20).connect() as ctx:
        assert ctx.layout == engine.layout
        assert ctx.lookup(Prefixes.from_jsonl(ingested)[0].tokens) == 128


@pytest.mark.once
def test_the_readmes_training_code_runs(server, ingested, tmp_path):
    readme = (EXAMPLES.parent / "README.md").read_text()
    code = re.search(r"## Train on a running server\n\n```python\n(.*?)```", readme, re.DOTALL)[1]
    for theirs, ours in (
        ('from_pretrained("path/to/model")', f"from_pretrained({str(smollm2_folder())!r})"),
        ('model_name="path/to/model"', 'model_name="smollm2"'),
        ('"prefixes.jsonl"', repr(str(ingested))),
        ("tcp://localhost:5555", server.url),
        ("http://localhost:8080", server.http_url),
        ("max_epochs=8", "max_epochs=1"),
    ):
        assert theirs in code
        code = code.replace(theirs, ours)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 cached" in done.stdout
    assert TokenScorer.load(tmp_path / "token-scorer.pt").num_layers == 30


@pytest.mark.once
def test_the_edit_example_stores_a_smaller_cache(server, engine, ingested):
    model = str(smollm2_folder())
    command = [sys.executable, str(EXAMPLES / "kv_edit.py"), str(ingested), model, server.url, server.http_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    salt = re.fullmatch(r"128 -> 64 tokens, (?:stored|already there) under salt (\S+)\n", done.stdout)[1]
    tokens = Prefixes.from_jsonl(ingested)[0].tokens[:128].tolist()
    address, expected = compressed_address(tokens, 64, policy="keydiff")
    assert salt == expected
    config = json.loads((smollm2_folder() / "config.json").read_text())
    with Connection(server.url, server.http_url, "smollm2", 20, engine.layout).connect() as ctx:
        original, edited = ctx.retrieve(tokens), ctx.retrieve(address, salt)
    expected_kv, _ = apply_policy(KeyDiff(), original, 64, Rope.from_config(config), engine.layout.num_kv_heads)
    assert_same_cache(edited, expected_kv)
