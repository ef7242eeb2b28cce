"""Messages of the wire: any bytes become a message of the kind that was asked for, or a typed error."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdata.datasets.chains import Chains
from kvdata.errors import ProtocolError
from kvdata.wire.messages import (
    CacheKey,
    KVEvent,
    KVEventBatch,
    PreparedRetrieve,
    PreparedStore,
    Registered,
    Registration,
    RetrieveContext,
    Slot,
    StoreContext,
    decode,
)

encode = msgspec.msgpack.encode
SLOT = Slot(4096, 64, [2, 1, 4, 4], "bfloat16")
EVENT = KVEvent(1, "stored", "m", [bytes(32)], None, [1, 2])
EXAMPLES: list[Any] = [
    CacheKey("m", 1, None, [1, 2], 0, 2, "r"),
    Registration(1, "m", 1, 16, 2, 8, "bfloat16", False),
    Registered("lmcache_l1_pool_x", 4096),
    PreparedStore(StoreContext([SLOT], [0])),
    PreparedRetrieve(True, b"data", RetrieveContext([SLOT])),
    KVEventBatch(True, 1, 2, False, [EVENT]),
    7,
    True,
    "OK",
    None,
]
KINDS = [type(example) for example in EXAMPLES] + [object]


@given(st.sampled_from(KINDS), st.binary(max_size=200))
@settings(max_examples=500)
def test_random_bytes_are_a_message_or_a_protocol_error(kind, frame):
    try:
        found = decode(frame, kind)
    except ProtocolError:
        return
    assert isinstance(found, kind)


@given(st.sampled_from(EXAMPLES), st.integers(0, 200), st.integers(0, 8), st.binary(max_size=8))
@settings(max_examples=500)
def test_a_message_with_bytes_changed_is_a_message_or_a_protocol_error(example, start, length, piece):
    frame = encode(example)
    start = min(start, len(frame))
    try:
        found = decode(frame[:start] + piece + frame[start + length :], type(example))
    except ProtocolError:
        return
    assert isinstance(found, type(example))


@given(st.sampled_from(EXAMPLES))
def test_messages_round_trip(example):
    assert decode(encode(example), type(example)) == example


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "frame",
    [
        b"\x91" * 200_000,  # nested deeper than any stack
        b"\x81\xa1x" + b"\x91" * 200_000,  # in a field that nobody knows
        b"\xdd\xff\xff\xff\xff",  # four thousand million items, of which none is there
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xa2\xff\xfe",  # not UTF-8
        b"",
    ],
    ids=range(8),
)
def test_what_only_claims_to_be_large_or_is_nested_deeply(kind, frame):
    _, before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before))
    try:
        with pytest.raises(ProtocolError):
            decode(frame, kind)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, before))


@given(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=4), st.lists(st.binary(max_size=33), max_size=3))
def test_events_are_counted_or_refused_whatever_they_say(tokens, hashes):
    """Nothing but what hashes to its own name becomes part of a prefix."""
    chains = Chains(settle_seconds=0.0, max_chunks=10)
    event = KVEvent(1, "stored", "m", hashes, hashes[0] if hashes else None, tokens)
    said = ""
    try:
        chains.add(KVEventBatch(True, 1, 2, False, [event]), now=0.0)
    except ProtocolError as exc:
        said = str(exc)
    assert not any(str(token) in said for token in tokens if abs(token) > 99)
    assert len(chains) == 0
