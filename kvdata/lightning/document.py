"""`KVCacheDocument`: a data module of plain values, for recipes that learn one document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvdata.datasets.kvcache import KVCacheDataset
from kvdata.errors import InvalidRequest
from kvdata.lightning.datamodule import KVCacheDataModule
from kvdata.lightning.documents import read_prefixes


class KVCacheDocument(KVCacheDataModule):
    """The cache of one prefix, the same in every stage: one batch is an epoch.

    Args:
        prefixes: prefix file (JSONL), as ``kvdata ingest`` writes it.
        index: which prefix of it.
        url, http_url, model_name, timeout, packing, model_config, cache_salt: as in `KVCacheDataset`.
        loader_options: more of `KVLoader`'s arguments.

    Raises:
        InvalidRequest: the prefix file cannot be read, or has no such prefix.
    """

    def __init__(
        self,
        prefixes: str | Path,
        url: str,
        http_url: str,
        index: int = 0,
        model_name: str | None = None,
        timeout: float = 60.0,
        packing: str = "auto",
        model_config: dict[str, Any] | str | Path | None = None,
        cache_salt: str = "",
        loader_options: dict[str, Any] | None = None,
    ) -> None:
        records = read_prefixes(prefixes)
        if not 0 <= index < len(records):
            raise InvalidRequest(f"{prefixes} has no prefix {index}, its last is {len(records) - 1}")
        dataset = KVCacheDataset(
            records[index : index + 1],
            url,
            http_url,
            model_name,
            timeout,
            None,
            packing,
            model_config,
            cache_salt=cache_salt,
        )
        super().__init__(dataset, dataset, dataset, dataset, **(loader_options or {}))
