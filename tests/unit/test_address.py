import struct

import pytest
from blake3 import blake3

from kvdata.edits.address import compressed_address, compressed_salt
from kvdata.errors import InvalidRequest

SOURCE = [1, 2, 300, 70000]


def test_salt_has_the_decided_form() -> None:
    packed = b"".join(struct.pack(">I", token) for token in SOURCE)
    digest = blake3(packed).hexdigest()[:16]
    assert compressed_salt(SOURCE, "keydiff") == f"~keydiff-r1-{digest}"
    assert compressed_salt(SOURCE, "learned", "r7", prefix="team") == f"team~learned-r7-{digest}"


def test_salt_depends_on_the_whole_source() -> None:
    salts = {compressed_salt(tokens, "p") for tokens in (SOURCE, SOURCE[:-1], [*SOURCE[:-1], 70001])}
    assert len(salts) == 3


def test_address_is_the_first_ids_and_the_salt_of_all() -> None:
    tokens, salt = compressed_address(SOURCE, 2, "random", revision="r2", prefix="x")
    assert tokens == [1, 2]
    assert salt == compressed_salt(SOURCE, "random.2", "r2", "x")
    assert compressed_address(SOURCE, 3, "random", "r2", "x")[1] != salt  # two budgets never share chunks


def test_tensors_and_lists_address_alike() -> None:
    torch = pytest.importorskip("torch")
    assert compressed_address(torch.tensor(SOURCE), 3, "p") == compressed_address(SOURCE, 3, "p")


@pytest.mark.parametrize("bad", ["@", "/", "\\", "\0"])
def test_separators_are_refused_everywhere(bad: str) -> None:
    for arguments in (
        {"policy": f"a{bad}"},
        {"policy": "a", "revision": bad},
        {"policy": "a", "prefix": bad},
    ):
        with pytest.raises(InvalidRequest, match="must not contain"):
            compressed_salt(SOURCE, **arguments)


def test_length_limit_is_128() -> None:
    fits = 128 - len(compressed_salt(SOURCE, "p"))
    assert len(compressed_salt(SOURCE, "p", prefix="x" * fits)) == 128
    with pytest.raises(InvalidRequest, match="129 characters"):
        compressed_salt(SOURCE, "p", prefix="x" * (fits + 1))


@pytest.mark.parametrize("tokens", [[], [-1], [2**32]])
def test_bad_tokens_are_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        compressed_salt(tokens, "p")


@pytest.mark.parametrize("kept", [0, 5])
def test_kept_must_fit_the_source(kept: int) -> None:
    with pytest.raises(InvalidRequest, match="kept"):
        compressed_address(SOURCE, kept, "p")
