"""Where a compressed cache is stored.

A compressed chunk depends on its whole source, so two sources that begin alike must not share it: the salt
carries a hash of the source. It also names policy and revision: a server keeps what was written first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from blake3 import blake3

from kvdata.errors import InvalidRequest

MAX_SALT = 128
FORBIDDEN = frozenset("@/\\\0")  # separators inside the server's keys and file names


def source_digest(source_tokens: Sequence[int]) -> str:
    """16 hex digits of blake3 over the ids as 4-byte big-endian unsigned integers."""
    try:
        packed = struct.pack(f">{len(source_tokens)}I", *(int(token) for token in source_tokens))
    except struct.error as exc:
        raise InvalidRequest("token ids must be integers from 0 to 2**32 - 1") from exc
    return blake3(packed).hexdigest()[:16]


def compressed_salt(source_tokens: Sequence[int], policy: str, revision: str = "r1", prefix: str = "") -> str:
    """``<prefix>~<policy>-<revision>-<16 hex digits of the source>``.

    Args:
        source_tokens: *all* token ids of the cache that was compressed, not only the kept ones.
        policy: name of the policy and whatever else tells its caches of one source apart, e.g. ``"keydiff.256"``.
        revision: of the policy's weights or code; a changed policy needs a new one.
        prefix: the salt of the source, if it had one.

    Raises:
        InvalidRequest: nothing to hash, an empty policy or revision, a forbidden character (``@ / \\ NUL``),
            or more than 128 characters.
    """
    if not policy or not revision or not len(source_tokens):
        raise InvalidRequest("a compressed cache needs a policy name, a revision and its source tokens")
    salt = f"{prefix}~{policy}-{revision}-{source_digest(source_tokens)}"
    if bad := FORBIDDEN.intersection(salt):
        raise InvalidRequest(f"a cache salt must not contain {', '.join(map(repr, sorted(bad)))}: {salt!r}")
    if len(salt) > MAX_SALT:
        raise InvalidRequest(f"the cache salt has {len(salt)} characters, the server allows {MAX_SALT}: {salt!r}")
    return salt


def compressed_address(
    source_tokens: Sequence[int], kept: int, policy: str, revision: str = "r1", prefix: str = ""
) -> tuple[list[int], str]:
    """Token ids and salt under which a cache of `kept` tokens is stored and later requested.

    The ids are the first `kept` source ids: heads keep different tokens, so no other ids would be more right. The
    salt's policy part is ``<policy>.<kept>``.

    Raises:
        InvalidRequest: as `compressed_salt`, or `kept` is not between 1 and the number of source tokens.
    """
    if not 1 <= kept <= len(source_tokens):
        raise InvalidRequest(f"kept={kept} is not between 1 and the {len(source_tokens)} source tokens")
    # Two budgets share their first ids: without the budget in the salt, one would be answered with the other's chunks.
    salt = compressed_salt(source_tokens, f"{policy}.{kept}", revision, prefix)
    return [int(token) for token in source_tokens[:kept]], salt
