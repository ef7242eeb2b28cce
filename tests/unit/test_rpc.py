"""One connection's calls against a scripted peer: each way in which a call can end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from kvdata.client.deadline import Deadline
from kvdata.client.rpc import Call, Rpc
from kvdata.errors import ConnectionLost, InvalidRequest, ProtocolError, ServerTimeout, ServerUnreachable

Frames = list[bytes]


class Peer:
    """A ROUTER in a thread that answers with what a script makes of the request's frames, as many as it likes."""

    def __init__(self, script: Callable[[Frames], list[Frames]]) -> None:
        self.script = script
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self.url = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._router.poll(20):
                client, *frames = self._router.recv_multipart()
                for reply in self.script(frames):
                    self._router.send_multipart([client, *reply])
        self._context.destroy(linger=0)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)


@pytest.fixture
def peer() -> Iterator[Callable[..., tuple[Rpc, Peer]]]:
    made: list[tuple[Rpc, Peer]] = []

    def make(script: Callable[[Frames], list[Frames]]) -> tuple[Rpc, Peer]:
        there = Peer(script)
        made.append((Rpc(there.url), there))
        return made[-1]

    yield make
    for rpc, there in made:
        rpc.close()
        there.stop()


def encoded(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def test_a_request_is_uid_number_and_one_frame_per_argument(peer):
    seen: list[Frames] = []

    def script(frames: Frames) -> list[Frames]:
        seen.append(frames)
        return [[*frames[:2], encoded(7)]]

    rpc, _ = peer(script)
    assert rpc.call("query_prefetch_status", "id", result=int, deadline=Deadline(30)) == 7
    rpc.call("commit_store", "key", 3, b"data", result=int, deadline=Deadline(30))
    assert [msgspec.msgpack.decode(f) for f in seen[0][1:]] == [9, "id"]
    assert [msgspec.msgpack.decode(f) for f in seen[1][1:]] == [17, "key", 3, b"data"]
    assert seen[0][0] != seen[1][0]


def test_two_frames_are_null(peer):
    rpc, _ = peer(lambda frames: [frames[:2]])
    assert rpc.call("noop", result=str, deadline=Deadline(30)) is None


def test_late_and_foreign_replies_are_drained_not_taken(peer):
    """The reply to a call that timed out comes with the next one, and after a stranger's."""
    held: list[Frames] = []

    def script(frames: Frames) -> list[Frames]:
        if not held:
            held.append([*frames[:2], encoded("late")])
            return []
        return [held[0], [b"stranger", b"x"], [*frames[:2], encoded("mine")]]

    rpc, _ = peer(script)
    with pytest.raises(ServerTimeout, match=r"noop: no answer from tcp.* within 0\.2 s"):
        rpc.call("noop", result=str, deadline=Deadline(0.2))
    assert rpc.call("noop", result=str, deadline=Deadline(30)) == "mine"


def test_an_answer_of_another_type_is_a_protocol_error(peer):
    rpc, _ = peer(lambda frames: [[*frames[:2], encoded({"a": 1})]])
    with pytest.raises(ProtocolError, match="noop"):
        rpc.call("noop", result=str, deadline=Deadline(30))
    rpc, _ = peer(lambda frames: [[*frames[:2], b"\xc1\xff"]])
    with pytest.raises(ProtocolError, match="do not decode"):
        rpc.call("noop", result=str, deadline=Deadline(30))


def test_what_has_ended_by_itself_is_not_given_back_any_more(peer):
    seen: list[object] = []

    def script(frames: Frames) -> list[Frames]:
        seen.append(msgspec.msgpack.decode(frames[2]))
        return [frames[:2]]

    rpc, _ = peer(script)
    late, now = time.monotonic(), time.monotonic() + 60
    rpc.post([Call("end_session", ("a",), late), Call("end_session", ("b",), now)], [Call("end_session", ("c",), late)])
    rpc.post([Call("end_session", ("d",), late)], [Call("end_session", ("e",))])
    rpc.settle(Deadline(30))
    assert sorted(seen) == ["b", "e"]


def test_a_peer_that_goes_away_ends_the_wait_at_once(peer):
    stopped = threading.Event()

    def script(frames: Frames) -> list[Frames]:
        stopped.set()
        return []

    rpc, there = peer(script)
    threading.Thread(target=lambda: (stopped.wait(5), there.stop())).start()
    with pytest.raises(ConnectionLost, match="before it answered"):
        rpc.call("noop", result=str, deadline=Deadline(60))
    assert rpc.lost()
    with pytest.raises(ConnectionLost, match="went away"):
        rpc.call("noop", result=str, deadline=Deadline(60))


def test_nobody_there_is_unreachable_within_the_deadline():
    rpc = Rpc("tcp://127.0.0.1:1")
    with pytest.raises(ServerUnreachable, match="--port"):
        rpc.call("noop", result=str, deadline=Deadline(0.2))
    rpc.close()
    rpc.close()
    with pytest.raises(InvalidRequest, match="ZMQ URL"):
        Rpc("nonsense")


def test_a_connection_in_use_by_another_thread_does_not_outlast_the_deadline(peer):
    asked = threading.Event()

    def script(frames: Frames) -> list[Frames]:
        asked.set()
        return []

    rpc, _ = peer(script)

    def wait() -> None:
        with pytest.raises(ServerTimeout):
            rpc.call("noop", result=str, deadline=Deadline(2))

    other = threading.Thread(target=wait)
    other.start()
    asked.wait(5)
    with pytest.raises(ServerTimeout, match="another thread"):
        rpc.call("noop", result=str, deadline=Deadline(0.1))
    other.join(10)


def test_a_send_that_breaks_off_between_two_frames_leaves_no_torso_and_no_socket(peer, monkeypatch):
    seen: list[Frames] = []

    def script(frames: Frames) -> list[Frames]:
        seen.append(frames)
        return [[*frames[:2], encoded(7)]]

    rpc, _ = peer(script)
    assert rpc.call("get_chunk_size", result=int, deadline=Deadline(30)) == 7
    monitor = rpc._monitor

    def broken_off(socket: zmq.Socket[bytes], frames: Frames, flags: int) -> None:
        socket.send(frames[0], flags | zmq.SNDMORE)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "send_multipart", broken_off)
        with pytest.raises(KeyboardInterrupt):
            rpc.call("get_chunk_size", result=int, deadline=Deadline(30))
    assert monitor.closed
    assert rpc.call("query_prefetch_status", "id", result=int, deadline=Deadline(30)) == 7
    assert [[msgspec.msgpack.decode(f) for f in frames[2:]] for frames in seen] == [[], ["id"]]
