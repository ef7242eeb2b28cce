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
    prompt, salt = prompts[3], f"refill-by-{by}"  # other tests store caches of their own under the prompts' addresses
    with connection.connect() as ctx:
        engine.complete(prompt, max_tokens=1, cache_salt=salt)
        assert ctx.wait_cached(prompt, salt) == PREFIX
        before = ctx.retrieve(prompt, salt)
        assert ctx.delete(prompt, salt) == PREFIX // ctx.chunk_size
        with openai_completion(engine.url, SERVED_NAME) as complete:
            options = {"on_missing": "refill", "refill": complete if by == "engine" else reference}
            data = KVCacheDataset([prompt], connection=connection, cache_salt=salt, **options)
            sample = data[0]
        assert sample["hit_tokens"] == PREFIX
        assert data.stats()["refilled"] == 1
        error = (sample["kv"].float() - before.float()).norm() / before.float().norm()
        assert error < 0.04
        assert torch.equal(ctx.retrieve(prompt, salt), sample["kv"])
        data.close()
