"""Pickles that want more than to be a list of tensors. Whatever they manage to call leaves a mark: see `tripped`."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator

import torch

from kvdata.wire import tensors

NUMEL, DTYPE = 24, torch.float32

tripped: list[object] = []


def trip(*arguments: object) -> object:
    """What a hostile pickle calls when nobody stops it."""
    tripped.append(arguments)
    return trip


# --- fragments of pickles


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def data(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def number(value: int) -> bytes:
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def dotted(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def whole(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


TRIP = name("tests.unit.hostile", "trip")
LOAD = name("torch.storage", "_load_from_bytes")
REBUILD = name("torch._utils", "_rebuild_tensor_v2")


# --- storages


def storage_bytes(archive: bool = False, tensor: torch.Tensor | None = None) -> bytes:
    """As ``torch.save`` writes a storage: the form that pickled tensors carry, or an archive."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storage = (torch.zeros(NUMEL, dtype=DTYPE) if tensor is None else tensor)._typed_storage()
        torch.save(storage, file, _use_new_zipfile_serialization=archive)
    return file.getvalue()


def deflated(archive: bytes) -> bytes:
    """The same archive, compressed: PyTorch reads these too, and a thousandfold of their size comes out."""
    source, target = zipfile.ZipFile(io.BytesIO(archive)), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in source.infolist():
            packed.writestr(entry.filename, source.read(entry.filename))
    return target.getvalue()


STORAGE = storage_bytes()
_SAID = text("cpu") + b"q\x03" + b"K" + bytes([NUMEL]) + b"Nt"  # in its header: where, how many elements, no view
assert _SAID in STORAGE


def tensor(storage: bytes = STORAGE, size: bytes = b"K\x18\x85", stride: bytes = b"K\x01\x85") -> bytes:
    """Fragment of a tensor with that serialised storage."""
    return call(REBUILD, call(LOAD, data(storage)), b"K\x00", size, stride, b"\x89", b"}")


def one(fragment: bytes) -> bytes:
    return whole(b"]" + fragment + b"a")


assert torch.equal(tensors.loads(one(tensor()), DTYPE, NUMEL, 1)[0], torch.zeros(NUMEL))  # the forge works


def said(where: str = "cpu", count: bytes = b"K\x18", view: bytes = b"N") -> bytes:
    """A tensor whose storage says something else of itself."""
    return one(tensor(STORAGE.replace(_SAID, text(where) + b"q\x03" + count + view + b"t")))


def in_header(fragment: bytes) -> bytes:
    """A tensor whose storage's header begins with another pickle."""
    return one(tensor(whole(fragment) + STORAGE))


def repeated(times: int) -> bytes:
    """One storage, asked for again and again."""
    return whole(b"](" + LOAD + b"q\x00" + data(STORAGE) + b"\x85q\x01" + b"h\x00h\x01R" * times + b"e")


NAMES = [
    ("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr"),
    ("builtins", "__import__"), ("builtins", "open"), ("subprocess", "Popen"), ("importlib", "import_module"),
    ("pickle", "loads"), ("_pickle", "Unpickler"), ("torch", "load"), ("torch.serialization", "_load"),
    ("torch", "UntypedStorage"), ("torch.storage", "UntypedStorage"), ("torch.storage", "TypedStorage"),
    ("torch._utils", "_rebuild_tensor"), ("torch._utils", "_rebuild_tensor_v3"), ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_device_tensor_from_numpy"), ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch._dynamo.utils", "dumps"), ("torch.hub", "load"), ("torch.ops", "load_library"), ("torch", "zeros"),
    ("numpy", "load"), ("numpy.core.multiarray", "_reconstruct"), ("collections", "Counter"),
    ("copyreg", "_reconstructor"), ("functools", "partial"), ("operator", "attrgetter"),
    ("kvdata.wire.tensors", "loads"), ("tests.unit.hostile", "trip"),
    ("torch.storage", "_load_from_bytes.__globals__"), ("torch._utils", "_rebuild_tensor_v2.__globals__"),
    ("collections", "OrderedDict.__init_subclass__"), ("collections", "OrderedDict.fromkeys"), ("", ""), ("..", "x"),
]  # fmt: skip

CORPUS: dict[str, bytes] = {
    "reduce": one(call(TRIP, text("x"))),
    "reduce after a tensor": whole(b"](" + tensor() + call(TRIP, text("x")) + b"e"),
    "reduce that is dropped again": whole(b"]" + tensor() + call(TRIP, text("x")) + b"0a"),
    "a chain of getattr": one(call(call(name("builtins", "getattr"), name("os", "environ"), text("copy")))),
    "eval": one(call(name("builtins", "eval"), text("__import__('tests.unit.hostile').unit.hostile.trip(1)"))),
    "INST": one(b"(" + text("x") + b"itests.unit.hostile\ntrip\n"),
    "OBJ": one(b"(" + TRIP + text("x") + b"o"),
    "NEWOBJ": one(TRIP + text("x") + b"\x85\x81"),
    "NEWOBJ_EX": one(TRIP + text("x") + b"\x85}\x92"),
    "BUILD": one(call(name("collections", "OrderedDict")) + b"}" + text("__class__") + TRIP + b"sb"),
    "extension registry": one(b"\x82\x01"),
    "persistent id": one(text("x") + b"Q"),
    "persistent id in a line": one(b"Px\n"),
    "out-of-band buffer": one(b"\x97"),
    "LONG4 of 2 GiB": one(b"\x8b" + struct.pack("<i", 2**31 - 1)),
    "negative LONG4": one(b"\x8b" + struct.pack("<i", -1)),
    "BYTEARRAY8 of a terabyte": one(b"\x96" + struct.pack("<Q", 1 << 40) + b"x"),
    "BINBYTES8 of a terabyte": one(b"\x8e" + struct.pack("<Q", 1 << 40) + b"x"),
    "BINUNICODE8 of an exabyte": one(b"\x8d" + struct.pack("<Q", 1 << 60) + b"x"),
    "frame of a terabyte": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"].",
    "memo of 2**31 entries": one(b"]r" + struct.pack("<I", 1 << 31)),
    "memo of 2**20 entries": one(b"]r" + struct.pack("<I", 1 << 20)),
    "memo never written": one(b"h\x07"),
    "deep tuples": whole(b")" + b"\x85" * 3000),
    "deep lists": whole(b"]" * 3000 + b"a" * 2999),
    "deep marks": whole(b"(" * 3000),
    "a list in itself": whole(b"]q\x00h\x00a"),
    "four thousand empty lists": whole(b"](" + b"]" * 4000 + b"e"),
    "one storage a thousand times": repeated(1000),
    "one storage twenty times": repeated(20),
    "protocol 255": b"\x80\xff].",
    "a subclass of list": one(call(name("collections", "UserList"))),
    "a tensor alone": whole(tensor()),
    "a tuple of tensors": whole(tensor() + b"\x85"),
    "a storage for a tensor": one(call(LOAD, data(STORAGE))),
    "a dict for a tensor": one(call(name("collections", "OrderedDict"))),
    "a forged storage": one(call(REBUILD, b"}", b"K\x00", b"K\x18\x85", b"K\x01\x85", b"\x89", b"}")),
    "a size of 2**2000": one(tensor(size=number(2**2000) + b"\x85")),
    "a size of 2**62 by 2**62": one(tensor(size=number(2**62) + number(2**62) + b"\x86")),
    "a negative size": one(tensor(size=number(-24) + b"\x85")),
    "two negative sizes": one(tensor(size=number(-4) + number(-6) + b"\x86", stride=number(-6) + b"K\x01\x86")),
    "a true size": one(tensor(size=b"\x88K\x18\x86", stride=b"K\x18K\x01\x86")),
    "no size": one(tensor(size=b")", stride=b")")),
    "a size in words": one(tensor(size=text("24"))),
    "a stride beyond the end": one(tensor(stride=number(2**40) + b"\x85")),
    "a stride of nothing": one(tensor(stride=b"K\x00\x85")),
    "a storage of words": one(call(LOAD, text("x"))),
    "a storage of nothing": one(tensor(b"")),
    "a truncated storage": one(tensor(STORAGE[:-1])),
    "a storage with more behind it": one(tensor(STORAGE + b"x")),
    "a storage twice as large": one(tensor(storage_bytes(tensor=torch.zeros(2 * NUMEL)))),
    "a storage of another dtype": one(tensor(storage_bytes(tensor=torch.zeros(NUMEL, dtype=torch.int32)))),
    "an archive": one(tensor(storage_bytes(archive=True))),
    "an archive that unpacks to 4 MB": one(tensor(deflated(storage_bytes(True, torch.zeros(1 << 20))))),
    "a pickle for a storage": one(tensor(pickle.dumps(torch.zeros(NUMEL)))),
    "a call in the header": in_header(call(TRIP, text("x"))),
    "INST in the header": in_header(b"(itests.unit.hostile\ntrip\n"),
    "NEWOBJ in the header": in_header(TRIP + b")\x81"),
    "another name in the header": in_header(name("os", "system")),
    "a name of torch in the header": in_header(name("torch", "load")),
    "a flood in the header": in_header(b"]" * 2000),
    "a device": said(where="cuda:0"),
    "no device": said(where="meta"),
    "a file": said(where="/etc/passwd"),
    "a storage that says 2**40 elements": said(count=number(2**40)),
    "a storage that says -1 elements": said(count=number(-1)),
    "a storage that says it is a view": said(view=text("0") + b"K\x00K\x18\x87"),
    "a big-endian storage": one(tensor(STORAGE.replace(b"q\x02\x88", b"q\x02\x89"))),
    "a storage of another module": one(tensor(STORAGE.replace(b"ctorch\n", b"cevil1\n"))),
    "another magic number": one(tensor(STORAGE.replace(b"\xfc\x9c", b"\xfd\x9c"))),
    **{f"{module}.{attribute}": one(call(name(module, attribute), text("x"))) for module, attribute in NAMES},
    **{f"dotted {m}.{a}": one(call(dotted(m, a), text("x"))) for m, a in NAMES},
    **{f"{m}.{a} not called": whole(b"](" + tensor() + name(m, a) + b"e") for m, a in NAMES if m},
    **{f"{m}.{a} in the header": in_header(name(m, a)) for m, a in NAMES if m},
}  # fmt: skip


def fragments() -> Iterator[bytes]:
    """What hypothesis builds programs of."""
    yield from (
        b"(",
        b"t",
        b"R",
        b"]",
        b"a",
        b"e",
        b"}",
        b"s",
        b"u",
        b")",
        b"\x85",
        b"\x86",
        b"\x87",
        b"\x94",
        b"0",
        b"2",
    )
    yield from (b"b", b"\x81", b"\x92", b"o", b"Q", b"\x93", b"N", b"\x88", b"\x89", b"K\x00", b"K\x01", b"K\x18", b".")
    yield from (b"h\x00", b"h\x01", b"q\x00", b"q\x01", b"1", b"\x97", b"\x98", b"\x8f", b"\x90", b"\x91", b"\x82\x01")
    yield from (TRIP, LOAD, REBUILD, data(STORAGE), text("x"), text("tests.unit.hostile"), text("trip"), tensor())
    yield from (name("collections", "OrderedDict"), name("torch", "FloatStorage"), number(2**40), call(TRIP, text("x")))


def unpickled_by(reader: Callable[[bytes], object], payload: bytes) -> bool:
    """Whether a reader runs what is in a payload."""
    tripped.clear()
    try:
        reader(payload)
    except Exception:
        pass
    return bool(tripped)
