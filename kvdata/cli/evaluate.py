"""The command ``evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from kvdata.cli.options import (
    HTTP_URL,
    NOT_CACHED,
    URL,
    HttpUrl,
    Model,
    ModelConfig,
    Packing,
    PrefixFile,
    Salt,
    Timeout,
    Url,
    bar,
    err,
    load_model,
    model_folder,
    out,
)
from kvdata.errors import MissingKV
from kvdata.layout import parse_dtype

if TYPE_CHECKING:
    from kvdata.datasets import KVCacheDataset
    from kvdata.engines.huggingface import HuggingFaceEngine
    from kvdata.evaluation import Arm, Method
    from kvdata.evaluation.folder import EvaluationFolder


def evaluate(
    prefixes: PrefixFile,
    output: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder of the results, or to go on with.")],
    model: Annotated[str, typer.Option(help="Folder of the Hugging Face model, or 'smollm2'.")],
    policies: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Names with commas, such as recency,keydiff; default is all. '' for none."),
    ] = None,
    scorer: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(exists=True, dir_okay=False, help="A trained TokenScorer, named by its file; can be repeated."),
    ] = None,
    autoencoder: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A trained KVAutoencoder, compared at its share of the bytes.",
        ),
    ] = None,
    cartridge: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(exists=True, dir_okay=False, help="A trained Cartridge; one for each document of the file."),
    ] = None,
    keep: Annotated[str, typer.Option(help="Shares of tokens kept.")] = "0.5,0.25",
    splits: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(exists=True, dir_okay=False, help="Splits that a training wrote: only what it held out."),
    ] = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Only so many windows of the file, from the first."),
    ] = None,
    passkey: Annotated[int, typer.Option(min=0, help="Passkey prompts at each of 5 depths; 0 for none.")] = 20,
    dtype: Annotated[str, typer.Option(help="The model computes in it; auto: bfloat16 where that is fast.")] = "auto",
    live: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="URL of a vLLM on the same server: score and decode the same caches through it, too."),
    ] = None,
    served_name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Name that it serves the model under; default: as --model-name."),
    ] = None,
    live_windows: Annotated[int, typer.Option(min=1, help="Windows for --live.")] = 8,
    live_tokens: Annotated[int, typer.Option(min=1, help="Tokens scored of each, one request each.")] = 16,
    url: Url = URL,
    http_url: HttpUrl = HTTP_URL,
    model_name: Model = None,
    cache_salt: Salt = "",
    packing: Packing = "auto",
    model_config: ModelConfig = None,
    timeout: Timeout = 60.0,
) -> None:
    """Compress the caches of a prefix file with every policy, and measure what that costs.

    Every cache goes through the server: the full one is read, the smaller one is stored under an address of its own,
    read back, measured and deleted again. Each finished measurement is kept in --out: after an interruption run the
    same command. Writes report.html, report.json, report.csv and report.png there. Exit code 3 when a window is not
    cached.
    """
    from kvdata.datasets import KVCacheDataset, Prefixes
    from kvdata.engines.huggingface import fast_dtype
    from kvdata.evaluation.folder import EvaluationFolder
    from kvdata.evaluation.methods import methods_named

    records = Prefixes.from_jsonl(prefixes)
    if splits is not None:
        from kvdata.lightning.split_file import SplitFile

        records = SplitFile.read(splits).held_out(records)
    computes = fast_dtype() if dtype == "auto" else parse_dtype(dtype)
    engine = load_model(model, computes)
    names = None if policies is None else [name for name in policies.split(",") if name]
    trained = (scorer or [], autoencoder or [], cartridge or [])
    methods = methods_named(engine.config, engine.layout.num_kv_heads, names, *trained)
    keeps = _shares(keep)
    dataset = KVCacheDataset(
        records[:limit],
        url,
        http_url,
        model_name,
        timeout,
        packing=packing,
        model_config=model_config,
        cache_salt=cache_salt,
    )
    try:
        name = model_folder(model).name
        folder = EvaluationFolder(output, records, dataset.context, name, str(computes).removeprefix("torch."))
        prompts = _measure(folder, engine, dataset, methods, keeps, passkey)
        live_count = min(live_windows, len(dataset)) if live else 0
        decoded = None
        if live:
            served = served_name or dataset.connection.model_name
            decoded = _through_engine(folder, engine, dataset, methods, keeps, live, served, live_count, live_tokens)
    except MissingKV as exc:
        err.print(f"{type(exc).__name__}: {exc}", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(NOT_CACHED) from exc
    finally:
        dataset.close()
    folder.report(dataset.prefixes, methods, keeps, prompts, engine.tokenizer.decode, out, live_count, decoded)
    out.print(f"open {output}/report.html; figures: report.json, report.csv", highlight=False, soft_wrap=True)


def _measure(
    folder: EvaluationFolder,
    engine: HuggingFaceEngine,
    dataset: KVCacheDataset,
    methods: list[Method],
    keeps: list[float],
    passkey: int,
) -> int:
    """Windows, then passkey prompts; returns how many of the latter there are."""
    from kvdata.evaluation import evaluate, evaluate_passkey, passkey_prompts

    evaluate(engine, dataset, methods, keeps, folder.rows, bar("windows"))
    if passkey:
        length = dataset.context.whole_chunks(dataset.prefixes[0].tokens)
        prompts = list(passkey_prompts(engine.tokenizer, length, passkey))
        evaluate_passkey(engine, dataset.context, prompts, methods, keeps, folder.passkey, bar("passkey"))
        return len(prompts)
    return 0


def _through_engine(
    folder: EvaluationFolder,
    engine: HuggingFaceEngine,
    dataset: KVCacheDataset,
    methods: list[Method],
    keeps: list[float],
    url: str,
    served_name: str,
    windows: int,
    tokens: int,
) -> dict[tuple[str, float], tuple[Arm, float]]:
    """Scores into the folder; returns what decoding gave."""
    from kvdata.datasets import KVCacheDataset
    from kvdata.engines.openai import openai_completion
    from kvdata.evaluation import LiveScorer, decode_live, score_live

    part = KVCacheDataset(dataset.prefixes[:windows], connection=dataset.connection, cache_salt=dataset.cache_salt)
    try:
        with openai_completion(url, served_name) as complete:
            scorer = LiveScorer(part.context, complete, engine, tokens)
            score_live(scorer, part, methods, keeps, folder.live, bar("engine scores"))
            return decode_live(scorer, part, methods, keeps, progress=bar("engine decodes"))
    finally:
        part.close()


def _shares(keep: str) -> list[float]:
    try:
        return [float(share) for share in keep.split(",")]
    except ValueError as exc:
        raise typer.BadParameter("shares with commas, such as 0.5,0.25", param_hint="--keep") from exc
