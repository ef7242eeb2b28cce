"""One LMCache server and one vLLM for all live tests, and the model they serve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdata import Connection
from kvdata.client.verify import Verification, verify
from kvdata.engines.huggingface import HuggingFaceEngine
from kvdata.engines.smollm2 import smollm2_folder
from kvdata.errors import MissingKV
from kvdata.layout import parse_dtype
from tests.live.stack import CHUNK, DTYPE, VLLM, lmcache, vllm
from tests.servers import Server
from training.text import documentation_windows

PREFIX, TAIL = 4 * CHUNK, 8
REAP_SECONDS = 30  # the least that LMCache takes


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stops_the_engine: runs after all other tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Building the environments is part of the first test: minutes, not the seconds of a unit test."""
    items.sort(key=lambda item: item.get_closest_marker("stops_the_engine") is not None)
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """LMCache's server; a model whose engine is silent for `REAP_SECONDS` is forgotten."""
    with lmcache(flags=["--worker-reap-timeout-seconds", str(REAP_SECONDS)]) as running:
        yield running


@pytest.fixture(scope="session")
def engine(server: Server) -> Iterator[VLLM]:
    """vLLM on that server."""
    with vllm(server) as running:
        yield running


@pytest.fixture(scope="session")
def reference() -> HuggingFaceEngine:
    """The same weights in Hugging Face's library, computing in float32."""
    return HuggingFaceEngine.from_pretrained(smollm2_folder(), kv_dtype=parse_dtype(DTYPE))


@pytest.fixture(scope="session")
def prompts(reference: HuggingFaceEngine) -> list[list[int]]:
    """Real text: prefixes of whole chunks, each followed by `TAIL` more tokens of the same document."""
    windows = documentation_windows(reference.tokenizer, PREFIX, TAIL)
    return [[*window.tokens.tolist(), *window.continuation.tolist()] for window in windows][:8]


@pytest.fixture(scope="session")
def verified(
    server: Server, engine: VLLM, reference: HuggingFaceEngine, prompts: list[list[int]], tmp_path_factory: Any
) -> Iterator[Verification]:
    """What `verify` says of the engine's cache; remembered for the session, and not in the user's own cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        file = tmp_path_factory.mktemp("packings") / "packings.json"
        patch.setattr("kvdata.client.packings._file", lambda: file)
        engine.complete(prompts[0], max_tokens=1)
        where = Connection(server.url, server.http_url, engine.model, timeout=30.0)
        deadline = time.monotonic() + 20
        while True:
            try:
                found = verify(where, reference, prompts[0][:PREFIX])
                break
            except MissingKV:  # an engine's stores become visible a little after its answer
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield found


@pytest.fixture
def connection(server: Server, engine: VLLM, verified: Verification) -> Connection:
    """By the model folder's name alone: the packing is the verified one."""
    config = Path(engine.model) / "config.json"
    return Connection(server.url, server.http_url, engine.model, timeout=30.0, model_config=config)
