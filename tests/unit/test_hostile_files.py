"""Files that others wrote: read without running anything or leaving their folder; what is wrong is a typed error."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdata import KVCacheDataset
from kvdata.datasets.manifest import Manifest
from kvdata.datasets.prefixes import Prefixes
from kvdata.datasets.snapshot import KVSnapshotDataset, Snapshot
from kvdata.edits.rope import Rope
from kvdata.errors import InvalidRequest, MissingKV, SnapshotDamaged, SnapshotError
from kvdata.models.token_scorer import TokenScorer
from tests.unit import hostile
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv

EXAMPLES = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture
def snapshot(ctx, connection, tmp_path) -> tuple[Path, dict[str, Any]]:
    """A snapshot of one prefix, and its index."""
    tokens = fresh_tokens(32)
    ctx.store(random_kv(32), tokens)
    path = tmp_path / "snapshot"
    Snapshot.write(KVCacheDataset([tokens], connection=connection), path)
    return path, json.loads((path / "snapshot.json").read_text())


NAMES = ["../other.safetensors", "{absolute}", "shard-00000.safetensors/../../other.safetensors", "", ".", "x"]
FIELDS = ["layout", "dtype", "layers", "heads", "window", "kinds", "prefixes", "shards", "skipped"]


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_reads_no_file_but_its_shards(snapshot, name):
    path, index = snapshot
    shard = path / index["shards"][0]["file"]
    other = path.parent / "other.safetensors"
    other.write_bytes(shard.read_bytes())  # it would do: the right bytes in the wrong place
    index["shards"][0]["file"] = name.format(absolute=other)
    (path / "snapshot.json").write_text(json.dumps(index))
    for opened in (Snapshot, Snapshot.verify, KVSnapshotDataset):
        with pytest.raises(SnapshotDamaged, match="no shards"):
            opened(path)


@given(field=st.sampled_from(FIELDS), value=JSON)
@EXAMPLES
def test_an_index_is_one_or_a_typed_error(snapshot, field, value):
    path, index = snapshot
    (path / "snapshot.json").write_text(json.dumps({**index, field: value}))
    try:
        Snapshot(path)
    except SnapshotError:
        pass


@given(st.one_of(st.binary(max_size=100), JSON.map(lambda value: json.dumps(value).encode())))
@EXAMPLES
def test_any_file_for_an_index(tmp_path_factory, folder, content):
    (folder / "snapshot.json").write_bytes(content)
    with pytest.raises(SnapshotError):
        Snapshot(folder)


DEEP = b"[" * 5000
LINES = st.one_of(
    JSON,
    st.fixed_dictionaries({"tokens": JSON}, optional={"salt": JSON, "continuation": JSON, "meta": JSON}),
    st.fixed_dictionaries({"kvdata": st.just(1)}, optional={"layout": JSON, "model_name": JSON}),
).map(lambda value: json.dumps(value).encode())


WRITTEN = {
    "source": "d", "source_tokens": 2, "tokens": [1, 2], "salt": "s", "policy": "p", "revision": "r1", "bytes": 1,
}  # fmt: skip


@given(field=st.sampled_from([*WRITTEN, "result", "meta", "more"]), value=JSON)
@EXAMPLES
def test_a_manifest_with_a_field_changed_is_one_or_a_typed_error(folder, field, value):
    file = folder / "manifest.jsonl"
    file.write_text(json.dumps({**WRITTEN, field: value}) + "\n")
    try:
        manifest = Manifest.load(file)
    except InvalidRequest:
        return
    assert len(manifest.prefixes()) == 1
    with pytest.raises(MissingKV):
        manifest.request_for([9])


@pytest.mark.parametrize("read", [Prefixes.from_jsonl, Manifest.load])
@given(lines=st.lists(st.one_of(LINES, st.binary(max_size=30), st.just(DEEP)), max_size=3))
@EXAMPLES
def test_any_lines_are_records_or_a_typed_error(folder, read, lines):
    file = folder / "lines.jsonl"
    file.write_bytes(b"\n".join(lines))
    try:
        read(file)
    except InvalidRequest:
        pass


def as_torch_saves(value: Any, folder: Path) -> bytes:
    torch.save(value, folder / "saved")
    return (folder / "saved").read_bytes()


class Trips:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return hostile.trip, ("x",)


def test_a_module_file_runs_nothing(folder):
    file = folder / "module.pt"
    for content in (as_torch_saves(Trips(), folder), pickle.dumps(Trips()), *hostile.CORPUS.values()):
        hostile.tripped.clear()
        file.write_bytes(content)
        with pytest.raises(InvalidRequest, match=r"no file of a trained module|is not a") as caught:
            TokenScorer.load(file)
        assert not hostile.tripped
        assert "weights_only" not in str(caught.value)  # nor does the error advise it


@pytest.fixture(scope="module")
def scorer(folder: Path) -> bytes:
    rope = Rope(torch.ones(LAYOUT.head_dim // 2), LAYOUT.head_dim)
    module = TokenScorer(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.num_kv_heads, LAYOUT.head_dim, rope)
    module.save(folder / "scorer.pt")
    return (folder / "scorer.pt").read_bytes()


@given(start=st.integers(0, 2**20), length=st.integers(0, 50), piece=st.binary(max_size=50))
@EXAMPLES
def test_a_damaged_module_file_is_a_module_or_a_typed_error(folder, scorer, start, length, piece):
    file, start = folder / "damaged.pt", start % len(scorer)
    file.write_bytes(scorer[:start] + piece + scorer[start + length :])
    try:
        TokenScorer.load(file)
    except InvalidRequest:
        pass
