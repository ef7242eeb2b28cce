"""The stream of KV events: followed where there is one, refused with the reason where there is none."""

from __future__ import annotations

import pytest

from kvdata import Connection
from kvdata.client.events import KVEventStream
from kvdata.datasets.chains import Chains
from kvdata.errors import UnsupportedServer
from kvdata.wire.keys import chunk_hashes
from tests.conformance.conftest import LAYOUT, MODEL, fresh_tokens, random_kv


def test_events_are_followed_through_a_restart(own_server):
    """What a client stores is not reported, but that it goes is; and a restarted server's events are new ones."""
    where = Connection(own_server.url, own_server.http_url, MODEL, 30.0, LAYOUT)
    if own_server.kind == "embedded" or own_server.release < (0, 5, 6):
        with pytest.raises(UnsupportedServer, match=r"0\.5\.6"):
            KVEventStream(where)
        return
    tokens, chains = fresh_tokens(128), Chains(0.0, 100)
    with KVEventStream(where) as stream:
        for removed, restarted in ((2, False), (4, True)):
            if restarted:
                own_server.kill()
                own_server.start()
            with where.connect() as ctx:
                ctx.store(random_kv(128), tokens)
                ctx.delete(tokens)
            while chains.counts.removed < removed:
                batch = stream.poll(30.0)
                assert batch is not None
                assert all(set(event.block_hashes) <= set(chunk_hashes(tokens, 64)) for event in batch.events)
                chains.add(batch, 0.0)
        assert chains.counts.incarnations == 1
        assert (chains.counts.lost, chains.counts.events) == (0, 2)
    assert chains.settled(1.0) is None
