"""A server forgets a registration, and the one in whose name it was comes back."""

from __future__ import annotations

import pytest

from tests.faults.checks import PATIENCE, wait_until
from tests.faults.conftest import REAL_GRACE


@pytest.mark.long
@pytest.mark.parametrize("call", ["retrieve", "store", "lookup"])
def test_a_client_that_was_idle_for_too_long(impatient_place, corpus, call):
    """It registers again before it asks; no call runs into the silence that an unknown instance gets."""
    server = impatient_place.server
    if server.release < (0, 5, 0):
        pytest.skip("never forgets")
    ctx = impatient_place.connect(timeout=PATIENCE)
    there = corpus.stored(ctx)
    tokens, kv = corpus.fresh()
    wait_until(lambda: not server.status()["non_cuda_context_meta"], "still registered", 3 * REAL_GRACE)
    with impatient_place.observer():  # so that it is the model's absence no longer, only the instance's
        if call == "store":
            assert ctx.store(kv, tokens) is True
        elif call == "retrieve":
            assert corpus.check(there, ctx.retrieve(there))
        else:
            assert ctx.lookup(there) == len(there)
    corpus.works_again(ctx)
