"""What ``kvdata ingest`` does, through a serving engine or with a model of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from kvdata.cli.options import bar, err, load_model, model_folder, out
from kvdata.client.connection import Connection
from kvdata.client.discovery import discover
from kvdata.client.http import Http
from kvdata.datasets.ingest import ingest, is_cached, is_prefix_file, lookup_context, read_prompts
from kvdata.datasets.prefixes import Prefixes, PrefixRecord, Tokenizer
from kvdata.errors import InvalidRequest
from kvdata.layout import KVLayout

_SHOWN_ERRORS = 3


@dataclass
class Job:
    """Prefixes, whose caches they are, and the file that lists them."""

    records: Prefixes
    model_name: str | None
    file: Path

    @classmethod
    def of(
        cls,
        sources: list[Path],
        output: Path | None,
        tokenizer: Path | None,
        model: str | None,
        model_name: str | None,
        window: int | None,
        continuation: int,
        cache_salt: str,
        only_engine: Callable[[], str],
    ) -> Job:
        """Read the sources; wrong usage when it is not clear where the result goes."""

        def make_tokenizer() -> Tokenizer:
            return _tokenizer(_folders())

        def _folders() -> Iterator[str | Path | None]:
            yield tokenizer
            yield model_folder(model) if model else None
            yield model_name or only_engine()

        if output is None and not (len(sources) == 1 and is_prefix_file(sources[0])):
            raise typer.BadParameter("texts need a file for the result", param_hint="--out")
        records = read_prompts(sources, make_tokenizer, window, continuation)
        if cache_salt:  # into the file, or the dataset would have to be told
            salted = [
                r if r.salt is not None else PrefixRecord(r.tokens, r.continuation, cache_salt, r.meta) for r in records
            ]
            records = Prefixes(salted, records.layout, records.model_name)
        return cls(records, model_name or records.model_name, output or sources[0])

    def save(self, layout: KVLayout | None) -> None:
        """Write the prefix file."""
        Prefixes(self.records, layout or self.records.layout, self.model_name).to_jsonl(self.file)


def through_model(job: Job, model: str, url: str, http_url: str, timeout: float) -> bool:
    """Prefill with a Hugging Face model and store; True when the server holds all of it."""
    from kvdata.engines.huggingface import fast_dtype

    job.model_name = job.model_name or model
    engine = load_model(model, fast_dtype())
    job.save(engine.layout)
    stored = short = 0
    with Connection(url, http_url, job.model_name, timeout, engine.layout).connect() as ctx:
        for record in bar("prefill")(job.records, len(job.records)):
            if len(record.tokens) < ctx.chunk_size:
                short += 1
            elif not is_cached(ctx, record):
                stored += engine.store_prefix(ctx, record.tokens.tolist(), record.salt or "")
        job.save(ctx.layout)
    present = len(job.records) - stored - short
    said = f"{stored} of {len(job.records)} prefixes stored, {present} were there already"
    out.print(said + (f", {short} shorter than a chunk" if short else ""))
    return not short


def through_engine(
    job: Job,
    engine: str,
    served_name: str | None,
    model: str | None,
    url: str,
    http_url: str,
    timeout: float,
    concurrency: int,
    settle: float,
    packing: str,
    model_config: Path | None,
) -> bool:
    """Have a serving engine compute and store; True when the server holds all of it."""
    from kvdata.engines.openai import openai_completion

    name = job.model_name = job.model_name or only_engine_at(http_url, timeout)
    config = model_config or _config_beside(name) or (_config_beside(model_folder(model)) if model else None)
    connection = Connection(url, http_url, name, timeout, job.records.layout, packing, config)
    job.save(None)
    layout: KVLayout | None = None
    with lookup_context(connection) as (ctx, known), openai_completion(engine, served_name or name) as complete:
        result = ingest(
            ctx, job.records, complete, concurrency=concurrency, settle_seconds=settle, progress=bar("prefill")
        )
        if known:
            layout = ctx.layout
    cached = sorted(result.stored + result.present)
    if layout is None and model is not None and cached:
        layout = _verified(connection, model, job.records[cached[0]])
    job.save(layout)
    out.print(f"{result}: {job.file}", highlight=False, soft_wrap=True, markup=False)
    for place, error in list(result.failed.items())[:_SHOWN_ERRORS]:
        err.print(f"prefix {place}: {type(error).__name__}: {error}", highlight=False, soft_wrap=True, markup=False)
    if layout is None and job.records.layout is None:
        err.print(
            "The byte order of this cache is not known, so the file has no layout yet. This finds it out and adds it: "
            f"kvdata verify {job.file} --model FOLDER",
            highlight=False,
            soft_wrap=True,
        )
    return result.complete


def _verified(connection: Connection, model: str, record: PrefixRecord) -> KVLayout | None:
    from kvdata.client.verify import verify

    found = verify(connection, load_model(model), record.tokens.tolist(), record.salt or "")
    err.print(str(found), highlight=False, soft_wrap=True)
    if found.packing is None:
        return None
    with connection.connect() as ctx:
        return ctx.layout


def only_engine_at(http_url: str, timeout: float) -> str:
    """Name of the one model that an engine has registered; `InvalidRequest` unless there is exactly one."""
    http = Http(http_url, timeout)
    try:
        engines = list(discover(http).engines)
    finally:
        http.close()
    if len(engines) != 1:
        raise InvalidRequest(
            f"{len(engines)} engines have registered a model at {http_url} ({', '.join(engines) or 'none'}); say whose "
            "caches are meant with --model-name"
        )
    return engines[0]


def _config_beside(folder: str | Path) -> Path | None:
    config = Path(folder) / "config.json"
    return config if config.is_file() else None


def _tokenizer(folders: Iterable[str | Path | None]) -> Tokenizer:
    """The tokenizer of the first that is a folder."""
    place = next((Path(folder) for folder in folders if folder and Path(folder).is_dir()), None)
    if place is None:
        raise InvalidRequest("texts need the model's tokenizer: give its folder as --tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError as missing:
        raise InvalidRequest("texts need a tokenizer: pip install 'kvdata[hf]'") from missing
    try:
        loaded: Tokenizer = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as exc:
        raise InvalidRequest(f"{place} holds no tokenizer: {exc}") from exc
    return loaded
