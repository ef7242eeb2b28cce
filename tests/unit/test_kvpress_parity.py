"""Our scores against those of kvpress 0.5.5, on the same model and text (made by fixtures/make_kvpress_scores.py).

kvpress protects the first or last tokens inside some presses; where ours leave that to `select`, it is told to.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from kvdata.edits.policies import TOVA, ExpectedAttention, KeyDiff, KeyNorm, Policy, Recency, SnapKV, Source
from kvdata.edits.rope import Rope
from kvdata.edits.selection import select
from kvdata.engines.huggingface import HuggingFaceEngine
from kvdata.engines.smollm2 import smollm2_folder

FIXTURE = Path(__file__).parents[1] / "fixtures" / "kvpress_scores.npz"


class Prefix(NamedTuple):
    kv: torch.Tensor
    source: Source
    rope: Rope
    num_kv_heads: int


@pytest.fixture(scope="module")
def theirs() -> dict[str, torch.Tensor]:
    with np.load(FIXTURE) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.fixture(scope="module")
def prefix(theirs: dict[str, torch.Tensor]) -> Prefix:
    try:
        folder = smollm2_folder()
    except ImportError as exc:
        pytest.skip(str(exc))
    engine = HuggingFaceEngine.from_pretrained(folder, dtype=torch.float32, kv_dtype=torch.float32)
    tokens = theirs["tokens"].tolist()
    source = Source(tokens=tokens, queries=engine.queries(tokens))
    return Prefix(engine.prefill(tokens), source, Rope.from_config(engine.config), engine.layout.num_kv_heads)


PAIRS = [
    ("knorm", lambda rope: KeyNorm(), 0),
    ("keydiff", lambda rope: KeyDiff(), 0),
    ("streaming-llm", lambda rope: Recency(), 4),
    ("snapkv", SnapKV, 0),
    ("tova", TOVA, 0),
    ("expected-attention", ExpectedAttention, 0),
]


@pytest.mark.parametrize(("press", "policy", "sinks"), PAIRS, ids=[press for press, _, _ in PAIRS])
def test_the_tokens_kept_are_those_of_kvpress(prefix, theirs, press, policy, sinks):
    made: Policy = policy(prefix.rope)
    scores = made.scores(prefix.kv, prefix.num_kv_heads, prefix.source)
    for keep, kept in zip(theirs["keeps"].tolist(), theirs[f"{press}.kept"], strict=True):
        count = int(keep * scores.shape[-1])
        assert (kept.sum(-1) == count).all()
        ours = torch.zeros_like(kept).scatter_(-1, select(scores, count, sinks=sinks, window=0), True)
        overlap = (ours & kept).sum(-1) / count  # [L, H]
        assert overlap.mean() >= 0.99
        assert overlap.min() >= 0.98
    if press != "streaming-llm":  # it scores nothing but 1 and 0
        torch.testing.assert_close(scores[theirs["layers"]], theirs[f"{press}.scores"], rtol=2e-3, atol=1e-6)
