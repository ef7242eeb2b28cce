"""Messages that come late, twice, in another order, damaged, or not at all."""

from __future__ import annotations

import pytest

from kvdata.errors import KVCacheSDKError
from tests.faults.checks import in_time
from tests.faults.proxy import PATIENCE, answered, double, drop, flipped, swapped, truncated

OPERATIONS = {
    "store": ("prepare_store", "commit_store", "lookup", "query_prefetch_status", "end_session"),
    "retrieve": ("lookup", "query_prefetch_status", "prepare_retrieve", "commit_retrieve", "end_session"),
}
POINTS = [(call, operation) for call, operations in OPERATIONS.items() for operation in operations]
REPLIES = {
    "dropped": drop,
    "doubled": double,
    "truncated": truncated,
    "flipped": flipped,
    "null": answered(),
    "other type": answered(b"\xa1x"),
    "nested": answered(b"\x91" * 100_000),
    "huge": answered(b"\xcf" + b"\xff" * 8),
    "negative": answered(b"\xff"),
}


def _marks(operation: str, fault: str) -> list[pytest.MarkDecorator]:
    """`make test` takes every fault at one point, and one fault at every point."""
    short = operation == "prepare_retrieve" or fault == "flipped"
    return [] if short else [pytest.mark.long]


CASES = [
    pytest.param(call, operation, fault, marks=_marks(operation, fault))
    for call, operation in POINTS
    for fault in REPLIES
    if (operation, fault) != ("query_prefetch_status", "null")  # that is how "still loading" looks
    if operation != "prepare_store" or fault == "doubled"
]
NEVER_TOLD = [
    pytest.param(fault, marks=[] if fault in ("flipped", "null") else [pytest.mark.long])
    for fault in REPLIES
    if fault != "doubled"
]


@pytest.mark.parametrize(("call", "operation", "fault"), CASES)
def test_a_reply_that_is_not_as_it_should_be(place, corpus, call, operation, fault):
    ctx = place.connect()
    there = corpus.stored(ctx)
    new, kv = corpus.fresh()
    place.proxy.replies(operation, REPLIES[fault])
    readable = [there]
    try:
        with in_time():
            if call == "store":
                assert ctx.store(kv, new) is True
                readable.append(new)
            else:
                corpus.check(there, ctx.retrieve(there))
    except KVCacheSDKError as error:
        place.names(error, call)
    place.heal()
    corpus.check_all_visible(readable)
    corpus.works_again(ctx)


@pytest.mark.parametrize("fault", NEVER_TOLD)
def test_a_reservation_that_is_never_told(impatient_place, corpus, fault):
    """Nobody knows then which of the chunks are the client's: none is deleted, and the server's time-out ends it."""
    ctx, other = impatient_place.connect(), impatient_place.connect()
    new, kv = corpus.fresh()
    half = len(new) // 2
    assert other.store(kv[:, :, :half], new[:half]) is True
    impatient_place.proxy.replies("prepare_store", REPLIES[fault])
    with pytest.raises(KVCacheSDKError) as caught, in_time():
        ctx.store(kv, new)
    impatient_place.names(caught.value, "store")
    impatient_place.heal()
    with other.lease(new) as chunks:
        assert len(chunks) * impatient_place.server.chunk_size == half  # it is there, and nobody else's
        assert other.lookup(new) == half
    corpus.store_once_free(other, new, kv)
    corpus.check_all_visible([new])
    corpus.works_again(ctx)


@pytest.mark.parametrize("operation", ["lookup", "query_prefetch_status", "prepare_retrieve"])
def test_replies_in_another_order(place, corpus, operation):
    """Each goes to the request that it answers."""
    ctx = place.connect(timeout=PATIENCE)
    prompts = [corpus.stored(ctx, chunks) for chunks in (1, 2, 3, 4)]
    place.proxy.replies(operation, swapped(), times=4)
    for tokens, kv in zip(prompts, ctx.retrieve_many(prompts), strict=True):
        assert corpus.check(tokens, kv)
        assert kv.shape[2] == len(tokens)


@pytest.mark.long
@pytest.mark.parametrize("operation", ["lookup", "prepare_retrieve", "commit_retrieve", "end_session"])
def test_requests_that_never_arrive(place, corpus, operation):
    ctx = place.connect()
    there = corpus.stored(ctx)
    place.proxy.requests(operation, drop)
    try:
        with in_time():
            corpus.check(there, ctx.retrieve(there))
    except KVCacheSDKError as error:
        place.names(error, "retrieve")
    corpus.works_again(ctx)
