"""Messages that come late, twice, in another order, damaged, or not at all."""

from __future__ import annotations

import pytest

from kvdata.errors import KVCacheSDKError
from tests.faults.checks import in_time
from tests.faults.proxy import answered, double, drop, flipped, truncated

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


CASES = [
    (call, operation, fault)
    for call, operation in POINTS
    for fault in REPLIES
    if (operation, fault) != ("query_prefetch_status", "null")  # that is how "still loading" looks
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
