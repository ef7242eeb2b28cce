"""Token ids, salts and chunk hashes: what addresses a stored chunk.

Chunk hash ``i`` is ``blake3(hash[i-1] || tokens of the chunk, each as 4-byte big-endian unsigned)``; the
hash before the first chunk is ``blake3`` of twelve zero bytes. Only whole chunks are hashed, and neither
model nor salt is part of the hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from blake3 import blake3

from kvdata.errors import InvalidRequest

Tokens = Sequence[int] | np.ndarray | torch.Tensor

NONE_HASH: bytes = blake3(bytes(12)).digest()
MAX_SALT_CHARACTERS = 128
_FORBIDDEN_IN_SALT = "@/\\\0"


def token_list(tokens: Tokens) -> list[int]:
    """Token ids as plain Python ints, the only kind the wire takes.

    Accepts a sequence of ints, a 1-D integer numpy array or torch tensor. Raises `InvalidRequest` for bools,
    floats, nested input, or ids outside ``0 .. 2**32 - 1`` (which a server answers with silence).
    """
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.detach().cpu().numpy()
    if not isinstance(tokens, np.ndarray):
        tokens = _array(tokens)
    if tokens.ndim != 1:
        raise InvalidRequest(f"token ids must be one-dimensional, got shape {tokens.shape}")
    if tokens.size == 0:
        return []
    if tokens.dtype.kind not in "iu":
        raise InvalidRequest(f"token ids must be integers, got {tokens.dtype}")
    if int(tokens.min()) < 0 or int(tokens.max()) > 0xFFFFFFFF:
        raise InvalidRequest("token ids must lie in 0 .. 2**32 - 1")
    ids: list[int] = tokens.tolist()
    return ids


def _array(tokens: Sequence[int]) -> np.ndarray:
    if isinstance(tokens, (str, bytes)):
        raise InvalidRequest("token ids must be integers")
    try:
        has_bools = bool({bool, np.bool_} & set(map(type, tokens)))  # numpy takes True for 1
        found = np.asarray(tokens) if len(tokens) else np.empty(0, np.int64)
    except (TypeError, ValueError) as exc:  # no sequence, or rows of different lengths
        raise InvalidRequest("token ids must be a one-dimensional sequence of integers") from exc
    if has_bools:
        raise InvalidRequest("token ids must be integers, got bools")
    return found


def check_salt(salt: str) -> None:
    """Raise `InvalidRequest` for a salt that a server would answer with silence."""
    if not isinstance(salt, str):
        raise InvalidRequest(f"cache_salt must be a string, got {type(salt).__name__}")
    if len(salt) > MAX_SALT_CHARACTERS or any(c in _FORBIDDEN_IN_SALT for c in salt) or not _encodable(salt):
        raise InvalidRequest(
            f"cache_salt {salt[:MAX_SALT_CHARACTERS]!r} is not allowed: at most {MAX_SALT_CHARACTERS} characters, none "
            "of @ / \\ NUL, no lone surrogate"
        )


def check_model_name(name: str) -> None:
    """Raise `InvalidRequest` for a model name that a server would answer with silence."""
    if not isinstance(name, str) or not name or "@" in name or not _encodable(name):
        raise InvalidRequest(f"model_name {name!r} is not allowed: a non-empty string without '@'")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as they are hashed: 4-byte big-endian unsigned. `InvalidRequest` for one that does not fit."""
    try:
        return np.asarray(tokens, dtype=">u4").tobytes()
    except OverflowError:
        # Not "from": numpy's message names the id.
        raise InvalidRequest("token ids must lie in 0 .. 2**32 - 1") from None


def chunk_hashes(tokens: Sequence[int], chunk_size: int) -> list[bytes]:
    """32-byte hash of each whole chunk of ``tokens``; `InvalidRequest` for an id that is none."""
    count = len(tokens) // chunk_size
    encoded = packed(tokens[: count * chunk_size])
    step = 4 * chunk_size
    hashes: list[bytes] = []
    previous = NONE_HASH
    for i in range(count):
        previous = chunk_hash(previous, encoded[i * step : (i + 1) * step])
        hashes.append(previous)
    return hashes


def chunk_hash(previous: bytes, encoded: bytes) -> bytes:
    """Hash of the chunk that follows ``previous``, from its tokens as 4-byte big-endian unsigned."""
    return blake3(previous + encoded).digest()


def kv_rank(world_size: int, rank: int) -> int:
    """The server's number of a shard: world size and rank, twice, one byte each."""
    return (world_size << 24) | (rank << 16) | (world_size << 8) | rank
