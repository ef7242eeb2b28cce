"""The headline figure: what half the cache gains in decode throughput, with dropped middle chunks and learned dropping.

Writes ``runs/live/report.json``. How fast a machine is decides no test: what is tested is that all arms were decoded
from the server's caches, and how well they predict.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvdata import Connection, KVCacheContext, KVCacheDataset, Prefixes
from kvdata.edits import functions
from kvdata.edits.functions import Edit
from kvdata.engines.huggingface import HuggingFaceEngine, fast_dtype
from kvdata.engines.openai import openai_completion
from kvdata.engines.smollm2 import smollm2_folder
from kvdata.evaluation import decode_arms, decoding_report, print_decoding, save_json, score_continuations
from kvdata.evaluation.decoding import Arm
from tests.live.environments import ROOT
from tests.live.stack import LOGS, SERVED_NAME, VLLM, lmcache, vllm
from training.demo import train
from training.text import prompts_and_windows

PROMPTS, PROMPT_TOKENS, DECODED, KEEP = 8, 3000, 64, 0.5
CONTEXT, CONTINUATION, EPOCHS = 2048, 64, 8
POOL_MB = 4096  # training windows 1.9 GB, prompts 0.6 GB, two halves of them 0.6 GB, and room below the watermark
GOAL = 1.5
ROUNDS = 3


@dataclass
class Stack:
    """An engine on a server of its own, a context of that server, and the training windows in it, also as a file."""

    engine: VLLM
    context: KVCacheContext
    windows: Prefixes
    file: Path


@pytest.fixture(scope="module")
def model() -> HuggingFaceEngine:
    """The same weights as the engine's."""
    return HuggingFaceEngine.from_pretrained(smollm2_folder(), dtype=fast_dtype())


@pytest.fixture(scope="module")
def texts(model: HuggingFaceEngine) -> tuple[list[list[int]], Prefixes]:
    """Prompts, and training windows of other documents."""
    return prompts_and_windows(model.tokenizer, PROMPTS, PROMPT_TOKENS, CONTEXT, CONTINUATION)


@pytest.fixture(scope="module")
def stack(texts: tuple[list[list[int]], Prefixes], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """LMCache and vLLM of their own, filled with the training windows by ``kvdata ingest``."""
    folder = tmp_path_factory.mktemp("headline")
    with lmcache(pool_mb=POOL_MB, name="headline-lmcache") as server, vllm(server, "headline-vllm") as engine:
        file = folder / "windows.jsonl"
        texts[1].to_jsonl(file)
        where = ["--url", server.url, "--http-url", server.http_url, "--engine", engine.url, "--model", engine.model]
        command = [sys.executable, "-m", "kvdata", "ingest", str(file), *where, "--served-name", SERVED_NAME]
        subprocess.run(command, check=True, timeout=600, env={**os.environ, "KVDATA_CACHE": str(folder)})
        filled = Prefixes.from_jsonl(file)
        assert filled.layout is not None
        assert filled.model_name == engine.model
        connection = Connection(server.url, server.http_url, engine.model, timeout=60.0, layout=filled.layout)
        with connection.connect() as ctx:
            yield Stack(engine, ctx, filled, file)


@pytest.fixture(scope="module")
def scorer(stack: Stack, model: HuggingFaceEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token scorer, trained on what vLLM left in the server."""
    out = tmp_path_factory.mktemp("training")
    dataset = KVCacheDataset(stack.windows, connection=stack.context.connection)
    assert len(dataset.coverage().hit) == len(stack.windows)
    train(model, dataset, out, EPOCHS)
    dataset.close()
    return out / "token-scorer.pt"


@pytest.fixture(scope="module")
def arms(stack: Stack, model: HuggingFaceEngine, texts: tuple[list[list[int]], Prefixes], scorer: Path) -> list[Arm]:
    edits: dict[str, Edit | None] = {
        "full": None,
        "middle_chunks": functions.drop_middle_chunks(model.config, KEEP),
        "learned": functions.learned(scorer, model.config, KEEP),
    }
    params = {"temperature": 0.0, "max_tokens": DECODED, "ignore_eos": True}
    with openai_completion(stack.engine.url, SERVED_NAME) as complete:
        return decode_arms(stack.context, complete, texts[0], edits, params, ROUNDS)


def test_half_the_cache_is_decoded_from_the_server(stack, model, arms, capsys):
    logprob = score_continuations(model, stack.context, arms)
    about = {"prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS, "decoded": DECODED, "keep": KEEP}
    save_json({**decoding_report(arms, logprob), **about}, LOGS / "report.json")
    with capsys.disabled():
        console = Console()
        console.print()
        title = f"Decoding {PROMPTS} prompts of {PROMPT_TOKENS} tokens, keep {KEEP:g} (goal {GOAL}x)"
        print_decoding(arms, logprob, console, title)
    whole = PROMPT_TOKENS // stack.context.chunk_size
    for arm, chunks in zip(arms, (whole, whole // 2, whole // 2), strict=True):
        assert arm.expected_chunks == PROMPTS * chunks
        assert arm.read_chunks == [PROMPTS * chunks] * ROUNDS
        assert [len(ids) for ids in arm.continuations] == [DECODED] * PROMPTS
        assert arm.decodes[0].output_tokens == PROMPTS * DECODED
    assert -2.0 < min(logprob.values()) <= max(logprob.values()) < 0


def test_the_scores_are_those_of_the_engine_itself(stack, model, arms):
    """One-token requests to vLLM, which reads the full cache for each, against the model on the retrieved cache."""
    full, _, learned = arms
    for arm in (full, learned):
        (ids, _), continuation = full.requests[0], arm.continuations[0]
        engine = [stack.engine.logprob(ids + continuation[:i], token) for i, token in enumerate(continuation)]
        one = [Arm(a.name, a.prefill, None, a.requests[:1], 0, continuations=a.continuations[:1]) for a in (full, arm)]
        found = score_continuations(model, stack.context, one)[arm.name]
        assert sum(engine) / len(engine) == pytest.approx(found, abs=0.05)


def test_the_notebook_runs(stack, monkeypatch):
    """Every code cell of the example notebook, in order, with fewer and shorter prompts."""
    connection = stack.context.connection
    assert connection.layout is not None
    settings = {
        "MODEL": stack.engine.model,
        "SERVED_NAME": SERVED_NAME,
        "URL": connection.url,
        "HTTP_URL": connection.http_url,
        "ENGINE": stack.engine.url,
        "PACKING": connection.layout.packing,
        "PROMPTS": "2",
        "PROMPT_TOKENS": "1100",
        "MAX_TOKENS": "8",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"KVDATA_{name}", value)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = json.loads((ROOT / "examples" / "token_dropping.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert len(names["arms"]) == 7
    assert len(names["figure"].axes[0].lines) == 3
    assert names["edited"].streams[0].output_text


def test_the_evaluation_through_the_engine_agrees_with_the_offline_one(stack, scorer, tmp_path):
    where = ["--url", stack.context.connection.url, "--http-url", stack.context.connection.http_url]
    what = ["--policies", "recency", "--scorer", str(scorer), "--keep", "0.5", "--passkey", "0", "--limit", "2"]
    live = ["--live", stack.engine.url, "--served-name", SERVED_NAME, "--live-windows", "2", "--live-tokens", "8"]
    command = [
        sys.executable,
        "-m",
        "kvdata",
        "evaluate",
        str(stack.file),
        "--out",
        str(tmp_path),
        "--model",
        "smollm2",
    ]
    subprocess.run([*command, *where, *what, *live], check=True, timeout=600)
    rows = {row["policy"]: row for row in json.loads((tmp_path / "report.json").read_text())["live"]}
    assert set(rows) == {"full", "recency", "token-scorer"}
    for policy, row in rows.items():
        assert row["tokens"] == 16
        chunks = CONTEXT // stack.context.chunk_size // (1 if policy == "full" else 2)
        assert row["read_chunks"] == row["expected_chunks"] == 16 * chunks
        assert row["decode_all_hits"]
        # The engine and the model here round differently in bfloat16.
        assert abs(row["delta_nll"] - row["offline_delta_nll"]) < 0.1
