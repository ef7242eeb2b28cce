"""A prefix that the server evicted, computed again: by vLLM, and by the model here."""

from __future__ import annotations

import pytest
import torch

from kvdata import KVCacheDataset
from kvdata.engines.openai import openai_completion
from tests.live.conftest import PREFIX
from tests.live.stack import SERVED_NAME


@pytest.mark.parametrize("by", ["engine", "model"])
def test_an_evicted_prefix_comes_back(engine, connection, prompts, reference, by):
    prompt = prompts[3]
    with connection.connect() as ctx:
        engine.complete(prompt, max_tokens=1)
        assert ctx.wait_cached(prompt) == PREFIX
        before = ctx.retrieve(prompt)
        assert ctx.delete(prompt) == PREFIX // ctx.chunk_size
        with openai_completion(engine.url, SERVED_NAME) as complete:
            refill = complete if by == "engine" else reference
            data = KVCacheDataset([prompt], connection=connection, on_missing="refill", refill=refill)
            sample = data[0]
        assert sample["hit_tokens"] == PREFIX
        assert data.stats()["refilled"] == 1
        error = (sample["kv"].float() - before.float()).norm() / before.float().norm()
        assert error < 0.04
        assert torch.equal(ctx.retrieve(prompt), sample["kv"])
        data.close()
