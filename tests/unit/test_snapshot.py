"""Snapshots: a server's caches in a folder, written safely and read without the server."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import kvdata.datasets.snapshot.shards
from kvdata import (
    Connection,
    KVCacheDataset,
    KVLayout,
    KVSnapshotDataset,
    Prefixes,
    PrefixRecord,
    Snapshot,
    collate,
    worker_init_fn,
)
from kvdata.datasets.snapshot.files import claimed
from kvdata.errors import (
    DiskFull,
    GeometryMismatch,
    InvalidRequest,
    MissingKV,
    OtherSnapshot,
    SnapshotDamaged,
    SnapshotError,
    SnapshotIncomplete,
    UnsupportedSnapshot,
)
from kvdata.server import EmbeddedServer
from tests.command import Finished
from tests.command import kvdata as kvdata_command
from tests.unit.conftest import LAYOUT, fresh_tokens, random_kv

CHUNK_BYTES = 32 * LAYOUT.token_bytes
TWO_A_SHARD = 5 * CHUNK_BYTES  # of the lengths below


@pytest.fixture
def records(connection) -> list[dict]:
    """Six cached prefixes of two, three and one chunks; the last token of some is beyond their last chunk."""
    made = []
    with connection.connect() as ctx:
        for i, length in enumerate((64, 96, 70, 40, 64, 96)):
            made.append({"tokens": fresh_tokens(length), "continuation": list(range(i)), "meta": {"n": i, "ü": [1]}})
            ctx.store(random_kv(length), made[-1]["tokens"])
    return made


@pytest.fixture
def live(records, connection):
    dataset = KVCacheDataset(records, connection=connection)
    yield dataset
    dataset.close()


def assert_equal(sample: dict, other: dict) -> None:
    assert sample.keys() == other.keys()
    for name, value in sample.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {file.name: (file.stat().st_ino, file.stat().st_size) for file in folder.iterdir()}


class Interrupted(Exception):
    pass


def interrupt_after(count: int):
    def progress(items, total):
        for number, item in enumerate(items):
            if number == count:
                raise Interrupted
            yield item

    return progress


def test_a_snapshot_has_the_live_samples_in_files_anyone_can_read(live, tmp_path):
    report = Snapshot.write(live, tmp_path / "new" / "s", shard_bytes=TWO_A_SHARD)
    folder = tmp_path / "new" / "s"
    assert (report.fetched, report.present, report.skipped) == ([0, 1, 2, 3, 4, 5], [], [])
    assert sorted(files(folder)) == [
        "prefixes.jsonl",
        *(f"shard-0000{n}.safetensors" for n in range(3)),
        "snapshot.json",
    ]
    assert report.bytes == sum(size for name, (_, size) in files(folder).items() if name.startswith("shard"))
    modes = {file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert modes == {folder.stat().st_mode & 0o666}
    read = KVSnapshotDataset(folder)
    assert len(read) == len(live) == len(read.prefixes)
    assert read.layout == LAYOUT
    for index in range(len(live)):
        assert_equal(read[index], live[index])
    assert_equal(read[-1], live[5])
    assert len(list(read)) == 6
    shard = load_file(folder / "shard-00001.safetensors")
    assert shard.keys() == {"2", "3", "4"}
    assert torch.equal(shard["3"], live[3]["kv"])
    assert Snapshot.verify(folder).complete


@pytest.mark.parametrize(
    ("packing", "block_size"), [("split", None), ("fused", None), ("vllm-cpu", 32), ("vllm-cpu-amx", 32)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_packing_is_kept_bit_by_bit(embedded, tmp_path, packing, block_size, dtype):
    layout = KVLayout(2, 2, 16, dtype, packing, block_size)
    connection = Connection(embedded.url, embedded.http_url, f"unit/{packing}-{dtype}", 30.0, layout)
    tokens, kv = fresh_tokens(64), torch.randn(2, 2, 64, 32).to(dtype)
    with connection.connect() as ctx:
        ctx.store(kv, tokens)
    Snapshot.write(KVCacheDataset([tokens], connection=connection), tmp_path)
    read = KVSnapshotDataset(tmp_path)
    assert torch.equal(read[0]["kv"], kv)
    assert read.layout == layout


def test_batches_are_one_buffer_as_of_the_live_dataset(live, tmp_path):
    Snapshot.write(live, tmp_path, shard_bytes=TWO_A_SHARD)
    read = KVSnapshotDataset(tmp_path)
    given = []

    def allocate(shape, dtype):
        given.append(torch.full(shape, 7, dtype=dtype))
        return given[-1]

    samples = read.fetch([4, 1, -3], allocate)
    assert [tuple(buffer.shape) for buffer in given] == [(3, 2, 3, 96, 16)]
    batch, wanted = collate(samples), collate(live.__getitems__([4, 1, 3]))
    assert batch.kv.data_ptr() == given[0].data_ptr()
    for name in ("kv", "tokens", "mask", "lengths", "index", "continuation", "continuation_mask"):
        assert torch.equal(getattr(batch, name), getattr(wanted, name)), name
    assert batch.meta == wanted.meta
    batch.kv.zero_()  # the caller's own
    assert_equal(read[4], live[4])
    assert read.fetch([], allocate) == []
    with pytest.raises(IndexError):
        read.fetch([6], allocate)


def test_items_are_views_of_the_file_and_transforms_get_their_own(live, tmp_path):
    Snapshot.write(live, tmp_path)
    read = KVSnapshotDataset(tmp_path)
    assert read[1]["kv"].data_ptr() == read[1]["kv"].data_ptr()

    def spoil(sample):
        sample["kv"].zero_()
        return {**sample, "seen": True}

    spoiling = KVSnapshotDataset(tmp_path, transform=spoil)
    assert not spoiling[1]["kv"].any()
    assert spoiling[1]["seen"]
    spoiling.transform = None
    assert_equal(spoiling[1], live[1])
    read[1]["kv"].zero_()  # against the advice: stays in this process
    Snapshot.verify(tmp_path)


def test_a_part_is_kept_as_a_part(records, connection, live, tmp_path):
    part = KVCacheDataset(records, connection=connection, heads=[1], window=slice(-16, None), kinds=("v",))
    Snapshot.write(part, tmp_path / "part")
    read = KVSnapshotDataset(tmp_path / "part")
    for index in (0, 3):
        kept, whole = read[index], live[index]
        assert torch.equal(kept["kv"], whole["kv"].unflatten(-1, (2, 8))[1:, :, -16:, 1])
        assert torch.equal(kept["tokens"], whole["tokens"][-16:])
        assert (kept["start"], kept["hit_tokens"]) == (whole["hit_tokens"] - 16, whole["hit_tokens"])
        assert torch.equal(kept["continuation"], whole["continuation"])
    other = KVCacheDataset(records, connection=connection, heads=[1], window=slice(-16, None))
    with pytest.raises(OtherSnapshot, match="choice of K and V"):
        Snapshot.write(other, tmp_path / "part")
    part.close()
    other.close()


def test_layers_and_dtype_when_written_and_when_read(records, connection, live, tmp_path):
    part = KVCacheDataset(records, connection=connection, layers=[2, 0], dtype=torch.float32, transform=id)
    Snapshot.write(part, tmp_path / "part")
    read = KVSnapshotDataset(tmp_path / "part")
    whole = live[1]["kv"]
    assert torch.equal(read[1]["kv"], whole[:, [2, 0]].float())
    one = KVSnapshotDataset(tmp_path / "part", layers=[-1], dtype=torch.float16)
    assert torch.equal(one[1]["kv"], whole[:, [2]].half())
    assert torch.equal(one.__getitems__([0, 1])[1]["kv"], whole[:, [2]].half())
    with pytest.raises(GeometryMismatch, match=r"layers \[1\] are not in"):
        KVSnapshotDataset(tmp_path / "part", layers=slice(1, None))
    with pytest.raises(GeometryMismatch, match="do not exist"):
        KVSnapshotDataset(tmp_path / "part", layers=[3])
    Snapshot.write(live, tmp_path / "whole")
    for layers in (slice(1, None), [2, 0]):
        some = KVSnapshotDataset(tmp_path / "whole", layers=layers)
        assert torch.equal(some[5]["kv"], live[5]["kv"][:, layers])
        assert torch.equal(some.__getitems__([0, 5])[1]["kv"], live[5]["kv"][:, layers])


def test_partial_hits_are_kept_as_far_as_they_go(records, connection, tmp_path):
    longer = [{**records[1], "tokens": records[1]["tokens"] + fresh_tokens(40)}, records[0]]
    live = KVCacheDataset(longer, connection=connection, min_hit_tokens=96)
    Snapshot.write(live, tmp_path)
    read = KVSnapshotDataset(tmp_path)
    assert read[0]["hit_tokens"] == 96
    assert read[0]["continuation"].tolist() == [*longer[0]["tokens"][96:], 0]
    for index in range(2):
        assert_equal(read[index], live[index])
    live.close()


def test_salts_are_filled_in(connection, tmp_path):
    tokens, kv = fresh_tokens(32), [random_kv(32), random_kv(32)]
    with connection.connect() as ctx:
        for salt, each in zip("ab", kv, strict=True):
            ctx.store(each, tokens, salt)
    both = [{"tokens": tokens}, {"tokens": tokens, "salt": "b"}]
    Snapshot.write(KVCacheDataset(both, connection=connection, cache_salt="a"), tmp_path)
    read = KVSnapshotDataset(tmp_path)
    assert [torch.equal(read[i]["kv"], kv[i]) for i in range(2)] == [True, True]
    again = KVCacheDataset(read.prefixes, connection=connection)
    assert_equal(again[0], read[0])
    again.close()
    with pytest.raises(OtherSnapshot, match="prefixes"):
        Snapshot.write(KVCacheDataset(both, connection=connection, cache_salt="b"), tmp_path)


def test_skipped_prefixes_are_counted_left_out_and_tried_again(records, connection, tmp_path):
    absent = [{"tokens": fresh_tokens(64)} for _ in range(20)]
    mixed = [records[0], *absent, {"tokens": fresh_tokens(8)}, records[1]]
    skipping = KVCacheDataset(mixed, connection=connection, on_missing="skip")
    report = Snapshot.write(skipping, tmp_path)
    assert (report.fetched, report.skipped) == ([0, 22], list(range(1, 22)))
    assert str(report).startswith("2 fetched, 0 were there already, 21 not cached, 0.0")
    read = KVSnapshotDataset(tmp_path)
    assert [sample["index"] for sample in read] == [0, 1]
    assert read.prefixes[1].tokens.tolist() == read[1]["tokens"].tolist() == records[1]["tokens"]
    assert read.snapshot.skipped == list(range(1, 22))
    with connection.connect() as ctx:
        ctx.store(random_kv(64), absent[4]["tokens"])
    report = Snapshot.write(skipping, tmp_path)
    assert (report.fetched, report.present, len(report.skipped)) == ([5], [0, 22], 20)
    assert [sample["tokens"][0].item() for sample in KVSnapshotDataset(tmp_path)] == [
        mixed[place]["tokens"][0] for place in (0, 5, 22)
    ]


def test_a_missing_prefix_raises_when_what_was_finished_is_safe(records, connection, tmp_path):
    strict = KVCacheDataset([*records, {"tokens": fresh_tokens(64)}], connection=connection)
    with pytest.raises(MissingKV, match="prefix 6"):
        Snapshot.write(strict, tmp_path, shard_bytes=2 * CHUNK_BYTES)
    with pytest.raises(SnapshotIncomplete, match="holds 5 of 7 prefixes"):
        KVSnapshotDataset(tmp_path)
    assert strict.context.stats()["handshakes"] == 0  # the dataset's own connection was left alone
    strict.on_missing = "skip"
    report = Snapshot.write(strict, tmp_path)
    assert (report.fetched, report.present, report.skipped) == ([5], [0, 1, 2, 3, 4], [6])
    assert len(KVSnapshotDataset(tmp_path)) == 6


def test_an_interruption_loses_only_the_shard_under_way(live, tmp_path):
    with pytest.raises(Interrupted):
        Snapshot.write(live, tmp_path, shard_bytes=TWO_A_SHARD, progress=interrupt_after(3))
    before = files(tmp_path)
    assert sorted(before) == ["prefixes.jsonl", "shard-00000.safetensors", "snapshot.json"]
    with pytest.raises(SnapshotIncomplete):
        KVSnapshotDataset(tmp_path)
    seen = []

    def count(items, total):
        seen.append(total)
        return items

    report = Snapshot.write(live, tmp_path, shard_bytes=TWO_A_SHARD, progress=count)
    assert seen == [4]
    assert (report.fetched, report.present) == ([2, 3, 4, 5], [0, 1])
    after = files(tmp_path)
    assert {name: after[name] for name in ("shard-00000.safetensors", "prefixes.jsonl")} == {
        name: before[name] for name in ("shard-00000.safetensors", "prefixes.jsonl")
    }
    read = KVSnapshotDataset(tmp_path)
    for index in range(6):
        assert_equal(read[index], live[index])
    report = Snapshot.write(live, tmp_path)
    assert (report.fetched, len(report.present)) == ([], 6)


def test_what_a_killed_writer_left_is_removed(live, tmp_path):
    with pytest.raises(Interrupted):
        Snapshot.write(live, tmp_path, shard_bytes=TWO_A_SHARD, progress=interrupt_after(3))
    (tmp_path / ".part").mkdir()
    (tmp_path / ".part" / ".tmpXyZ").write_bytes(b"half a shard")
    shutil.copy(tmp_path / "shard-00000.safetensors", tmp_path / "shard-00007.safetensors")  # finished, not listed
    Snapshot.write(live, tmp_path, shard_bytes=10 * TWO_A_SHARD)
    assert sorted(files(tmp_path)) == [
        "prefixes.jsonl",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
        "snapshot.json",
    ]
    assert_equal(KVSnapshotDataset(tmp_path)[5], live[5])


def test_a_killed_writer_leaves_a_folder_to_go_on_with(live, tmp_path):
    """SIGKILL between two shards, by the process itself."""
    Prefixes(live.prefixes, LAYOUT, live.connection.model_name).to_jsonl(tmp_path / "prefixes.jsonl")
    code = (
        "import os, signal, sys\n"
        "from kvdata import KVCacheDataset, Prefixes, Snapshot\n"
        "def progress(items, total):\n"
        "    for number, item in enumerate(items):\n"
        "        if number == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield item\n"
        "data = KVCacheDataset(Prefixes.from_jsonl(sys.argv[1]), sys.argv[2], sys.argv[3])\n"
        f"Snapshot.write(data, sys.argv[4], shard_bytes={TWO_A_SHARD}, progress=progress)\n"
    )
    where = (str(tmp_path / "prefixes.jsonl"), live.connection.url, live.connection.http_url, str(tmp_path / "s"))
    killed = subprocess.run([sys.executable, "-c", code, *where], capture_output=True, timeout=60, check=False)
    assert killed.returncode == -9, killed.stderr
    report = Snapshot.write(live, tmp_path / "s")
    assert (report.present, report.fetched) == ([0, 1], [2, 3, 4, 5])
    Snapshot.verify(tmp_path / "s")


@pytest.fixture
def written(live, tmp_path) -> Path:
    Snapshot.write(live, tmp_path / "s", shard_bytes=TWO_A_SHARD)
    return tmp_path / "s"


def test_other_caches_are_refused_and_nothing_is_touched(embedded, records, connection, written):
    before = files(written)
    renamed = Connection(embedded.url, embedded.http_url, "unit/other", 30.0, LAYOUT)
    wider = Connection(embedded.url, embedded.http_url, "unit/wider", 30.0, KVLayout(3, 2, 16))
    for difference, dataset in (
        ("model name", KVCacheDataset(records, connection=renamed)),
        ("model name", KVCacheDataset(records, connection=wider)),
        ("list of layers", KVCacheDataset(records, connection=connection, layers=[0])),
        ("dtype", KVCacheDataset(records, connection=connection, dtype=torch.float32)),
        ("number of prefixes", KVCacheDataset(records[:-1], connection=connection)),
        ("digest of the prefixes", KVCacheDataset(records[::-1], connection=connection)),
        ("digest", KVCacheDataset([*records[1:], {**records[0], "meta": {}}], connection=connection)),
    ):
        with pytest.raises(OtherSnapshot, match=f"its {difference}"):
            Snapshot.write(dataset, written)
    index = json.loads((written / "snapshot.json").read_text())
    index["layout"]["head_dim"] = 4
    (written / "snapshot.json").write_text(json.dumps(index))
    with pytest.raises(OtherSnapshot, match="its layout is"):
        Snapshot.write(KVCacheDataset(records, connection=connection), written)
    assert {name for name, value in files(written).items() if before[name] != value} <= {"snapshot.json"}


def test_other_files_are_refused(live, tmp_path):
    (tmp_path / "prefixes.jsonl").write_text("mine")
    with pytest.raises(OtherSnapshot, match="no snapshot"):
        Snapshot.write(live, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["prefixes.jsonl"]
    with pytest.raises(SnapshotError, match="cannot be made"):
        Snapshot.write(live, tmp_path / "prefixes.jsonl")
    with pytest.raises(SnapshotError, match="holds no snapshot"):
        KVSnapshotDataset(tmp_path)
    with pytest.raises(InvalidRequest, match="shard_bytes"):
        Snapshot.write(live, tmp_path, shard_bytes=0)


def test_a_second_writer_is_refused(live, tmp_path):
    with claimed(tmp_path), pytest.raises(SnapshotError, match="another process is writing"):
        Snapshot.write(live, tmp_path)
    Snapshot.write(live, tmp_path)


def test_a_truncated_shard_is_refused_and_fetched_again_once_deleted(live, written):
    shard = written / "shard-00001.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    for use in (KVSnapshotDataset, Snapshot.verify, lambda folder: Snapshot.write(live, folder)):
        with pytest.raises(SnapshotDamaged, match=r"shard-00001.safetensors has .* delete this file"):
            use(written)
    shard.unlink()
    with pytest.raises(SnapshotDamaged, match="is gone"):
        KVSnapshotDataset(written)
    assert Snapshot.write(live, written).fetched == [2, 3, 4]
    assert_equal(KVSnapshotDataset(written)[3], live[3])
    Snapshot.verify(written)


def test_a_changed_byte_is_found_by_verify(live, written):
    shard = written / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    KVSnapshotDataset(written)
    with pytest.raises(SnapshotDamaged, match=r"changed since they were written: shard-00000.safetensors"):
        Snapshot.verify(written)
    content[:8] = bytes(8)  # no header any more
    shard.write_bytes(content)
    with pytest.raises(SnapshotDamaged, match="is not the shard"):
        KVSnapshotDataset(written)[0]


def test_a_changed_prefix_file_is_refused_and_put_back(live, written):
    file = written / "prefixes.jsonl"
    file.write_text(file.read_text().replace('"n": 1', '"n": 2'))
    with pytest.raises(SnapshotDamaged, match=r"prefixes.jsonl is gone or was changed"):
        KVSnapshotDataset(written)
    Snapshot.write(live, written)
    assert KVSnapshotDataset(written)[1]["meta"] == live[1]["meta"]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"kvdata_snapshot": 2}, UnsupportedSnapshot, "version 2"),
        ({"layers": "all"}, SnapshotDamaged, "layers"),
        ({"skipped": [0]}, SnapshotDamaged, "twice"),
        ({"prefixes": 2}, SnapshotDamaged, "beyond its 2"),
        ({"kvdata_snapshot": None}, SnapshotDamaged, "no index"),
    ],
)
def test_an_index_that_is_not_ours_is_refused(live, written, change, error, match):
    file = written / "snapshot.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    for use in (KVSnapshotDataset, lambda folder: Snapshot.write(live, folder)):
        with pytest.raises(error, match=match):
            use(written)


def test_a_full_disk_leaves_finished_shards_and_no_part(live, tmp_path):
    """The system's limit on a file's size stands for a full disk: the same way out of the same call."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * CHUNK_BYTES // 2, unlimited[1]))  # the second prefix has 3 chunks
    try:
        with pytest.raises(DiskFull, match=r"no room for .*shard-00001.* free some space"):
            Snapshot.write(live, tmp_path, shard_bytes=CHUNK_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert sorted(files(tmp_path)) == ["prefixes.jsonl", "shard-00000.safetensors", "snapshot.json"]
    assert Snapshot.write(live, tmp_path).present == [0]
    Snapshot.verify(tmp_path)


def test_labels_that_json_cannot_hold_are_refused(connection, tmp_path):
    odd = KVCacheDataset([PrefixRecord(np.arange(32), meta={"n": np.int64(1)})], connection=connection)
    with pytest.raises(InvalidRequest, match="meta of prefix 0"):
        Snapshot.write(odd, tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (2, "spawn"), (2, "forkserver")])
def test_loaders_read_it_when_the_server_is_gone(records, tmp_path, workers, start):
    with EmbeddedServer(chunk_size=32, pool_bytes=4 << 20) as server:
        connection = Connection(server.url, server.http_url, "unit/model", 30.0, LAYOUT)
        with connection.connect() as ctx:
            for record in records:
                ctx.store(random_kv(len(record["tokens"])), record["tokens"])
        live = KVCacheDataset(records, connection=connection)
        wanted = [collate(live.__getitems__([i, i + 1])) for i in (0, 2, 4)]
        Snapshot.write(live, tmp_path, shard_bytes=TWO_A_SHARD)
        live.close()
    read = KVSnapshotDataset(tmp_path)
    assert read[0]["hit_tokens"] == 64  # mapped here before the workers start
    loader = DataLoader(
        read,
        batch_size=2,
        num_workers=workers,
        multiprocessing_context=start,
        collate_fn=collate,
        worker_init_fn=worker_init_fn,
    )
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == 3
        for batch, live_batch in zip(batches, wanted, strict=True):
            assert torch.equal(batch.kv, live_batch.kv)
            assert torch.equal(batch.tokens, live_batch.tokens)
            assert torch.equal(batch.index, live_batch.index)


def test_a_pickle_is_small(written, live):
    read = KVSnapshotDataset(written, layers=[1])
    assert read[2]["kv"].any()
    packed = pickle.dumps(read)
    assert len(packed) < 1000
    assert_equal(pickle.loads(packed)[2], read[2])


def test_an_empty_dataset(connection, tmp_path):
    report = Snapshot.write(KVCacheDataset(Prefixes([]), connection=connection), tmp_path)
    assert (str(report), len(KVSnapshotDataset(tmp_path))) == ("0 fetched, 0 were there already, 0.000 GB", 0)


def test_without_safetensors_the_error_says_what_to_install(live, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, kvdata.datasets.snapshot.shards.__name__)
    monkeypatch.delitem(sys.modules, "kvdata.datasets.snapshot.writing", raising=False)
    for use in (lambda: Snapshot.write(live, tmp_path / "s"), lambda: KVSnapshotDataset(tmp_path)):
        with pytest.raises(ImportError, match=r"pip install 'kvdata\[snapshot\]'"):
            use()


def test_the_command(embedded, live, tmp_path):
    absent = {"tokens": fresh_tokens(64)}
    prefixes = tmp_path / "prefixes.jsonl"
    Prefixes([*live.prefixes, *Prefixes.of([absent])], LAYOUT, live.connection.model_name).to_jsonl(prefixes)

    def run(*options: str) -> Finished:
        where = ("--url", embedded.url, "--http-url", embedded.http_url)
        return kvdata_command("snapshot", str(prefixes), str(tmp_path / "s"), *where, *options)

    strict = run()
    assert strict.returncode == 3
    assert strict.stderr.startswith("MissingKV: prefix 6: 0 of 64 tokens are cached")
    skipping = run("--skip-missing")
    assert skipping.returncode == 3, skipping.stderr
    assert skipping.stdout.startswith("6 fetched, 0 were there already, 1 not cached, 0.000 GB: ")
    assert_equal(KVSnapshotDataset(tmp_path / "s")[5], live[5])
    with live.connection.connect() as ctx:
        ctx.store(random_kv(64), absent["tokens"])
    whole = run()
    assert (whole.returncode, whole.stdout.startswith("1 fetched, 6 were there already, 0.000 GB: ")) == (0, True)
    assert len(KVSnapshotDataset(tmp_path / "s")) == 7
    other = run("--layers", "0,2", "--dtype", "float32")
    assert (other.returncode, other.stderr.startswith("OtherSnapshot: ")) == (1, True)
    assert run("--layers", "first").returncode == 2
