"""Pickles of strangers: what may be in one is decided before any of it is run."""

from __future__ import annotations

import pickletools
from typing import IO

from kvdata.errors import UnsafePayload

# All that pickled tensors consist of. The others are refused: some make pickle allocate what a length or an index in
# the payload says (BYTEARRAY8, a PUT far beyond the memo), some call what they find (BUILD, INST, NEWOBJ).
PLAIN = frozenset(
    """
    PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET EMPTY_LIST APPEND APPENDS EMPTY_TUPLE
    TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINUNICODE
    SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BINBYTES8 GLOBAL STACK_GLOBAL
    """.split()  # noqa: SIM905 - a list of strings would take forty lines
)


def check_opcodes(pickled: bytes | IO[bytes], allowed: frozenset[str], limit: int) -> None:
    """`UnsafePayload` unless a pickle has at most ``limit`` opcodes, all of them ``allowed``.

    Each costs a pickle one byte and its reader up to a hundred, and time: their number is bounded by what a payload is
    to hold, not by its size. Reads a file up to the pickle's end. Raises what `pickletools` raises for a broken one.
    """
    for number, (opcode, argument, _) in enumerate(pickletools.genops(pickled), start=1):
        if opcode.name not in allowed or (opcode.name == "LONG_BINPUT" and int(argument or 0) > limit):
            raise UnsafePayload(f"payload uses the pickle opcode {opcode.name}; a list of tensors does not")
        if number > limit:
            raise UnsafePayload(f"payload has more than the {limit} pickle opcodes that its tensors need")
