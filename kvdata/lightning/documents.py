"""`KVCacheDocuments`: a data module of plain values, for a YAML file, whose splits share no document."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

from kvdata.datasets.kvcache import KVCacheDataset
from kvdata.datasets.prefixes import Prefixes
from kvdata.datasets.splits import DocumentSplits, document_names, split_by_document
from kvdata.errors import InvalidRequest, MissingKV
from kvdata.lightning.datamodule import KVCacheDataModule
from kvdata.lightning.split_file import SplitFile

log = logging.getLogger("kvdata")

# Which datasets a Trainer's function reads.
_READ = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class KVCacheDocuments(KVCacheDataModule):
    """Training, validation and test caches of a prefix file, split by document; predicts on the test's.

    Before a run, one process looks up whether the caches that it will read are there, and writes down which document
    is in which split. Every rank reads that, also in later runs: once written, another prefix file or other numbers are
    refused, so that no test document is trained on. Which documents are held out follows from their names alone (see
    `kvdata.datasets.splits`). The training loader's place is part of the checkpoint, as in `KVCacheDataModule`.

    Args:
        prefixes: prefix file (JSONL), as ``kvdata ingest`` writes it.
        url, http_url, model_name, timeout, packing, model_config, cache_salt: as in `KVCacheDataset`.
        split_by: key in each record's ``meta`` that names its document.
        held_out, validation: prefixes that the test and the validation have at least, of whole documents.
        limit: training prefixes, the first of the file; all by default.
        more_training: another prefix file, of other documents, all of which is trained on and nothing held out.
        split_seed: another holds other documents out.
        split_file: where the splits are written; by default ``<name of the prefix file>.splits.json`` in the Trainer's
            ``default_root_dir``. A folder that all ranks share.
        on_missing: ``"raise"``, before the run, when caches are missing, or ``"skip"`` them.
        batch_size, shuffle, drop_last, max_tokens, seed, num_workers: as in `KVCacheDataModule`.
        dataset_options: more of `KVCacheDataset`'s arguments, such as ``retries`` or ``layers``.
        loader_options: more of the loader's arguments, such as ``threads`` or ``prefetch``.

    Raises:
        InvalidRequest: a prefix file cannot be read, or split (see `split_by_document`), or `more_training` has a
            document that is held out.
    """

    def __init__(
        self,
        prefixes: str | Path,
        url: str,
        http_url: str,
        model_name: str | None = None,
        timeout: float = 60.0,
        packing: str = "auto",
        model_config: dict[str, Any] | str | Path | None = None,
        cache_salt: str = "",
        split_by: str = "document",
        held_out: int = 48,
        validation: int = 16,
        limit: int | None = None,
        more_training: str | Path | None = None,
        split_seed: int = 0,
        split_file: str | Path | None = None,
        on_missing: Literal["raise", "skip"] = "raise",
        batch_size: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        max_tokens: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        dataset_options: dict[str, Any] | None = None,
        loader_options: dict[str, Any] | None = None,
    ) -> None:
        self._prefixes = Path(prefixes)
        records = read_prefixes(self._prefixes)
        splits = split_by_document(records, held_out, validation, split_by, split_seed)
        chosen = {"split_by": split_by, "held_out": held_out, "validation": validation, "seed": split_seed}
        self._splits = SplitFile(records.digest(), chosen, splits.documents)
        self._split_file = Path(split_file) if split_file is not None else None
        self._on_missing = on_missing
        train = splits.train[:limit]
        if more_training is not None:
            train = Prefixes((*train, *_others(Path(more_training), splits, split_by)), train.layout, train.model_name)

        def dataset(part: Prefixes) -> KVCacheDataset | None:
            where = (url, http_url, model_name, timeout, None, packing, model_config)
            options = {"cache_salt": cache_salt, "on_missing": on_missing, **(dataset_options or {})}
            return KVCacheDataset(part, *where, **options) if len(part) else None

        super().__init__(
            dataset(train),
            dataset(splits.validation),
            dataset(splits.test),
            dataset(splits.test),
            batch_size,
            shuffle,
            drop_last,
            max_tokens,
            seed,
            num_workers=num_workers,
            **(loader_options or {}),
        )

    def prepare_data(self) -> None:
        """Look that the run's caches are there, and write the splits; Lightning calls it in one process.

        Raises:
            MissingKV: caches are missing, with ``on_missing="raise"``.
            InvalidRequest: other splits were written before.
        """
        self._check_coverage()
        self._splits.write(self.split_file)

    def setup(self, stage: str) -> None:
        """`InvalidRequest` when the splits that were written are not this module's."""
        self._splits.require(self.split_file)

    @property
    def split_file(self) -> Path:
        """Where the splits are written."""
        if self._split_file is None:
            folder = self.trainer.default_root_dir if self.trainer is not None else "."
            return Path(folder) / f"{self._prefixes.stem}.splits.json"
        return self._split_file

    def _check_coverage(self) -> None:
        running = self.trainer.state.fn if self.trainer is not None else None
        names = _READ[running.value] if running is not None else ("train", "val", "test")
        found = {name: d.coverage() for name in names if isinstance(d := self._datasets[name], KVCacheDataset)}
        missing = sum(len(coverage.missing) + len(coverage.partial) for coverage in found.values())
        self.teardown("")  # this process may be none that reads
        if not missing:
            return
        total = sum(len(coverage.hit) for coverage in found.values()) + missing
        said = f"{missing} of {total} prefixes of {self._prefixes} are not (fully) cached"
        if self._on_missing == "skip":
            log.warning("%s, and are skipped", said)
            return
        raise MissingKV(
            f"{said}; compute them with: kvdata ingest {self._prefixes} --engine URL (or --model FOLDER), or train on "
            "the others with on_missing='skip'"
        )


def read_prefixes(path: str | Path) -> Prefixes:
    """`Prefixes.from_jsonl`; a file that cannot be opened is an `InvalidRequest` that says what writes one."""
    try:
        return Prefixes.from_jsonl(path)
    except OSError as exc:
        raise InvalidRequest(f"the prefix file cannot be read ({exc}); kvdata ingest writes one") from exc


def _others(path: Path, splits: DocumentSplits, split_by: str) -> Prefixes:
    """Further training prefixes; `InvalidRequest` when one is of a document that is held out."""
    records = read_prefixes(path)
    held_out = {*splits.documents["test"], *splits.documents["validation"]}
    if both := sorted(held_out & set(document_names(records, split_by))):
        raise InvalidRequest(f"{path} has prefixes of documents that are held out: {', '.join(both)}")
    return records
