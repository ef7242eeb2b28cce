"""Every error kvdata raises, in one small tree.

    KVCacheSDKError
    ├── InvalidRequest (also ValueError)     the call itself is wrong; nothing was sent
    │   ├── GeometryMismatch                 tensor, dtype or layout do not fit the model's cache
    │   └── OtherSource                      a compressed cache belongs to another document
    ├── UnsupportedLayout                    a cache this release cannot read (MLA, hybrid, unknown format)
    │   └── UnknownPacking                   the byte order of a fused cache has not been said
    ├── ModelNotRegistered                   the server does not know the model (never reported as a miss)
    ├── MissingKV                            a dataset needed KV that the server does not hold
    ├── LeaseLost                            views of a lease may have shown something else
    ├── ServerError                          the server, or the way to it
    │   ├── ServerUnreachable (also ConnectionError)   nobody answers at that URL
    │   │   └── ConnectionLost               the peer went away during a call
    │   ├── ServerTimeout (also TimeoutError)          reached, but no answer in time: outcome unknown
    │   ├── UnsupportedServer                wrong mode, transport or release
    │   ├── PoolNotMappable                  the server's shared memory cannot be opened from here
    │   └── ProtocolError                    an answer that breaks the protocol
    │       └── UnsafePayload                a pickle that asks for more than plain tensors
    ├── StoreFailed                          a store that did not become readable
    │   ├── PoolFull                         no room, even after waiting for eviction
    │   ├── StoreConflict                    the address holds, or is being given, other content
    │   └── CacheLocked                      a reader holds what should be deleted
    ├── SnapshotError                        a snapshot folder that cannot be read or written
    │   ├── OtherSnapshot                    it holds other caches, or other files
    │   ├── SnapshotIncomplete               the writing of it was interrupted
    │   ├── SnapshotDamaged                  a file of it is gone, truncated or changed
    │   ├── UnsupportedSnapshot              a newer kvdata wrote it
    │   └── DiskFull                         no room on the disk
    └── OtherEvaluation                      a folder holds the evaluation of other windows, or under other settings

Each can be built from one string, because PyTorch re-creates a worker's exception as ``Type(message)``.
"""


class KVCacheSDKError(Exception):
    """Root of all kvdata errors; the message says what happened and what to do next."""


class InvalidRequest(KVCacheSDKError, ValueError):
    """The arguments of a call are wrong. Nothing was sent to the server."""


class GeometryMismatch(InvalidRequest):
    """A tensor, dtype or layout does not fit the geometry of the model's cache."""


class OtherSource(InvalidRequest):
    """A learned cache stands for one document, and was asked to stand for another."""


class UnsupportedLayout(KVCacheSDKError):
    """The model's cache has a layout that cannot be read as ``[2, L, T, D]`` here."""


class UnknownPacking(UnsupportedLayout):
    """Engines order the bytes of this cache in different ways, and which one it is has not been said."""


class ModelNotRegistered(KVCacheSDKError):
    """The server does not know this model, so it can neither hit nor miss."""


class MissingKV(KVCacheSDKError):
    """A dataset asked for KV that the server does not (fully) hold."""


class LeaseLost(KVCacheSDKError):
    """The server may have given the memory of a lease to others while its views were used."""


class ServerError(KVCacheSDKError):
    """The server, or the way to it, failed."""


class ServerUnreachable(ServerError, ConnectionError):
    """Nobody answers at the URL."""


class ConnectionLost(ServerUnreachable):
    """The server went away while a call was under way."""


class ServerTimeout(ServerError, TimeoutError):
    """No answer within the deadline; whether the operation took effect is unknown."""


class UnsupportedServer(ServerError):
    """The server runs in a mode, transport or release that cannot serve this client."""


class PoolNotMappable(ServerError):
    """The server's shared-memory pool cannot be mapped by this process."""


class ProtocolError(ServerError):
    """The server answered something that breaks the protocol."""


class UnsafePayload(ProtocolError):
    """A pickled payload contains anything but plain CPU tensors of the expected kind."""


class StoreFailed(KVCacheSDKError):
    """A store did not become readable."""


class PoolFull(StoreFailed):
    """The server has no room for the chunks."""


class StoreConflict(StoreFailed):
    """The address already holds, or is just being given, other content."""


class CacheLocked(StoreFailed):
    """Chunks that should be deleted are locked by a reader."""


class SnapshotError(KVCacheSDKError):
    """A folder holds no snapshot, or cannot be written."""


class OtherSnapshot(SnapshotError):
    """A folder holds a snapshot of other caches, or other files. Nothing in it was changed."""


class SnapshotIncomplete(SnapshotError):
    """A snapshot whose writing has not come to its end."""


class SnapshotDamaged(SnapshotError):
    """A file of a snapshot is gone, truncated or changed."""


class UnsupportedSnapshot(SnapshotError):
    """A snapshot of a version that this release does not read."""


class DiskFull(SnapshotError):
    """There is no room for a file of a snapshot; what was finished before is kept."""


class OtherEvaluation(KVCacheSDKError):
    """A folder holds results of other windows, another model or other settings. Nothing in it was changed."""
