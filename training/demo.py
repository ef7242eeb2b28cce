"""The main job, end to end: ``make demo``, or ``python -m training.demo``.

A server comes up; SmolLM2-135M prefills real text into it; a scorer learns token dropping from a DataLoader over the
live caches; every policy's compressed caches are written back; the continuations decoded from what the server then
holds are compared. Results: a table, ``report.json``, ``report.png`` and the training log below ``--out``.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import lightning as L
import numpy as np
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader

from kvdata import Connection, KVCacheDataset, Prefixes, PrefixRecord, collate, worker_init_fn
from kvdata.client.counters import counters
from kvdata.datasets import Manifest
from kvdata.edits.functions import learned_policy, weights_revision
from kvdata.edits.policies import KeyDiff, KeyNorm, Oracle, Policy, Random, Recency
from kvdata.edits.rope import Rope
from kvdata.engines.huggingface import HuggingFaceEngine, fast_dtype
from kvdata.engines.smollm2 import smollm2_folder
from kvdata.errors import KVCacheSDKError
from kvdata.evaluation import (
    PolicyCaches,
    comparisons,
    evaluate_caches,
    print_results,
    save_json,
    save_plot,
    summarise,
)
from kvdata.lightning import KVCacheWriter
from kvdata.models.token_scorer import TokenScorer
from training.text import documentation_windows, split_by_document
from training.token_dropping import PREPARED_ON, CompressCaches, Teacher, TokenDropping

MODEL = "SmolLM2-135M-Instruct"
CONTEXT, CONTINUATION = 512, 64
CHUNK = 128  # both budgets are whole chunks
KEEPS = (256, 128)
BATCH = 4
TRAINING_BATCH = 2
POOL_GB = 6.0

console = Console()


def main() -> None:
    """Run the demo; exit code 1 and one line if it fails."""
    options = _options()
    try:
        if options.url:
            run(options, options.url, options.http_url)
        else:
            with embedded_server() as (url, http_url):
                run(options, url, http_url)
    except KVCacheSDKError as exc:
        console.print(f"[red]{type(exc).__name__}[/red]: {exc}", highlight=False)
        sys.exit(1)


def run(options: argparse.Namespace, url: str, http_url: str) -> None:
    """The job against a running server with chunks of `CHUNK` tokens (or a divisor)."""
    started = time.monotonic()
    L.seed_everything(0, verbose=False)
    out: Path = options.out
    for old in ("logs", "checkpoints"):
        shutil.rmtree(out / old, ignore_errors=True)
    for old in ("report.json", "report.png", "manifest.jsonl", "token-scorer.pt"):
        (out / old).unlink(missing_ok=True)
    before = counters(http_url)

    _step("model and text")
    engine = HuggingFaceEngine.from_pretrained(smollm2_folder(), dtype=fast_dtype(), model_name=MODEL)
    windows = documentation_windows(engine.tokenizer, CONTEXT, CONTINUATION)
    training, held_out = split_by_document(windows, options.held_out)
    training = training[: options.train] if options.train else training
    documents = len({r.meta["name"] for r in (*training, *held_out)})
    console.print(
        f"{len(training)} training and {len(held_out)} held-out windows of {CONTEXT} + {CONTINUATION} tokens from "
        f"{documents} documents of Python's own reference; no document is in both"
    )
    connection = Connection(url, http_url, MODEL, timeout=60.0, layout=engine.layout)

    _step("prefill: the engine fills the server")
    ingest(engine, connection, [*training, *held_out])

    _step("training: batches from the running server")
    train_set = KVCacheDataset(training, connection=connection)
    console.print(f"coverage of the training set: {train_set.coverage()}")
    scorer = train(engine, train_set, out, options.epochs)

    _step("compression: every policy's caches go back into the server")
    policies: list[tuple[Policy, str]] = [(p, "r1") for p in (Random(), Recency(), KeyNorm(), KeyDiff(), Oracle())]
    policies.insert(4, learned_policy(scorer.eval(), weights_revision(scorer)))
    source = KVCacheDataset(held_out, connection=connection)
    manifest = out / "manifest.jsonl"
    writer = compress(engine, source, policies, manifest)

    _step("evaluation: continuations decoded from what the server holds")
    caches = [PolicyCaches("full", 1.0, source)]
    for policy, _ in policies:
        for keep in KEEPS:
            dataset = KVCacheDataset(read_back(manifest, held_out, policy.name, keep), connection=connection)
            caches.append(PolicyCaches(policy.name, keep / CONTEXT, dataset, policy.trained, policy.sees))
    rows = evaluate_caches(engine, caches, progress=_progress("windows"))
    results, compared = summarise(rows), comparisons(rows)
    for dataset in (train_set, *(c.dataset for c in caches)):
        dataset.close()

    after = counters(http_url)
    found = {key: after[key] - before[key] for key in after}
    chunks = {keep: keep // chunk_tokens(http_url) for keep in (CONTEXT, *KEEPS)}
    windows_made = len(policies) * len(held_out)
    ingested = (len(training) + len(held_out)) * chunks[CONTEXT]
    written = windows_made * sum(chunks[keep] for keep in KEEPS)
    # A server counts a read whenever a read lock is released: a store's confirmation and coverage() are reads too.
    looked_up = ingested + written + writer.counts.chunks_read + len(training) * chunks[CONTEXT]
    prepared = min(PREPARED_ON, len(training))
    batches = (prepared + options.epochs * len(training) + 2 * len(held_out)) * chunks[CONTEXT] + written
    expected = {"stored_chunks": ingested + written, "retrieved_chunks": looked_up + batches}
    report = {
        "results": results,
        "comparisons": compared,
        "server": found,
        "expected": expected,
        "model": MODEL,
        "context_tokens": CONTEXT,
        "continuation_tokens": CONTINUATION,
        "chunk_tokens": CONTEXT // chunks[CONTEXT],
        "documents": documents,
        "windows": len(held_out),
        "training_windows": len(training),
        "epochs": options.epochs,
        "seconds": round(time.monotonic() - started, 1),
    }
    save_json(report, out / "report.json")
    title = f"Dropping tokens of {MODEL}'s KV cache ({CONTEXT} tokens, {len(held_out)} held-out windows)"
    save_plot(results, out / "report.png", title)
    print_results(results, compared, console, title)
    console.print(
        f"{found['stored_chunks']} chunks stored, {found['retrieved_chunks']} retrieved, "
        f"{writer.counts.failed} writes failed; {report['seconds']:.0f} s\n"
        f"report: {out}/report.json, plot: {out}/report.png, training log: {out}/logs"
    )
    if found != expected:
        raise KVCacheSDKError(f"the server counted {found}, the job amounts to {expected}; is somebody else using it?")


def ingest(engine: HuggingFaceEngine, connection: Connection, records: list[PrefixRecord]) -> None:
    """Prefill batches of windows and store each window's KV; the client registers the model's layout."""
    batches = [records[i : i + BATCH] for i in range(0, len(records), BATCH)]
    with connection.connect() as ctx:
        for batch in _progress("windows")(batches, len(batches)):
            caches = engine.prefill_batch([r.tokens.tolist() for r in batch])
            for record, kv in zip(batch, caches, strict=True):
                ctx.store(kv, record.tokens)


def train(engine: HuggingFaceEngine, dataset: KVCacheDataset, out: Path, epochs: int) -> TokenScorer:
    """Fit the scorer on batches that two workers read from the server."""
    loader = DataLoader(
        dataset,
        batch_size=TRAINING_BATCH,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        collate_fn=collate,
        worker_init_fn=worker_init_fn,
    )
    recipe = TokenDropping(engine)
    checkpoint = ModelCheckpoint(out / "checkpoints", filename="token-scorer-{epoch}")
    logger = CSVLogger(out, name="logs", version="")
    trainer = _trainer(out, max_epochs=epochs, callbacks=[checkpoint], logger=logger, gradient_clip_val=1.0)
    trainer.fit(recipe, loader)
    recipe.scorer.save(out / "token-scorer.pt")
    return recipe.scorer


def compress(
    engine: HuggingFaceEngine, source: KVCacheDataset, policies: list[tuple[Policy, str]], manifest: Path
) -> KVCacheWriter:
    """Compress every held-out cache with every policy; the callback stores what ``predict`` puts out."""
    module = CompressCaches(
        policies, KEEPS, Rope.from_config(engine.config), engine.layout.num_kv_heads, Teacher(engine)
    )
    writer = KVCacheWriter(source.connection, manifest)
    loader = DataLoader(source, batch_size=BATCH, num_workers=2, collate_fn=collate, worker_init_fn=worker_init_fn)
    _trainer(manifest.parent, callbacks=[writer], logger=False).predict(module, loader, return_predictions=False)
    return writer


def read_back(manifest: Path, windows: Prefixes, policy: str, keep: int) -> Prefixes:
    """The addresses of one policy's caches, in the windows' order, with the windows' continuations."""
    written = {e.meta["index"]: e for e in Manifest.load(manifest).select(policy, keep)}
    return Prefixes(
        PrefixRecord(np.asarray(written[i].tokens), window.continuation, written[i].salt)
        for i, window in enumerate(windows)
    )


@contextmanager
def embedded_server() -> Iterator[tuple[str, str]]:
    """``kvdata serve`` as a process on free ports; stopped at the end."""
    room = shutil.disk_usage("/dev/shm").free
    transfer = "shm" if room > POOL_GB * 2**30 else "pickle"
    if transfer == "pickle":
        console.print(f"/dev/shm has {room / 2**30:.1f} GiB free, the pool wants {POOL_GB:g}: using pickle transfer")
    command = [sys.executable, "-m", "kvdata", "serve", "--port", "0", "--http-port", "0"]
    command += ["--chunk-size", str(CHUNK), "--pool-gb", str(POOL_GB), "--transfer", transfer]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("kvdata serve: "):
                url, http_url = line.split()[2:4]
                break
        else:
            raise KVCacheSDKError(f"kvdata serve ended with exit code {process.wait()}")
        yield url, http_url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def chunk_tokens(http_url: str) -> int:
    """The server's chunk size in tokens."""
    return int(httpx.get(f"{http_url}/status", trust_env=False, timeout=10).json()["chunk_size"])


def _trainer(out: Path, **options: Any) -> L.Trainer:
    # Advice on hardware, loggers and torch internals is not what someone who tries the demo wants to read.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`.*")
    return L.Trainer(
        default_root_dir=out, accelerator="cpu", devices=1, enable_model_summary=False, log_every_n_steps=1, **options
    )


def _progress(unit: str) -> Any:
    def wrap(items: Iterable[Any], total: int) -> Iterator[Any]:
        return iter(track(items, description=unit, total=total, console=console))

    return wrap


def _step(title: str) -> None:
    console.rule(f"[bold]{title}", align="left")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the results")
    parser.add_argument("--train", type=int, default=0, help="at most so many training windows (default: all)")
    parser.add_argument("--held-out", type=int, default=48, help="at least so many held-out windows")
    parser.add_argument("--epochs", type=int, default=8, help="training epochs")
    parser.add_argument("--url", help="use this running server (ZMQ URL) instead of starting one")
    parser.add_argument("--http-url", default="http://localhost:8080", help="HTTP URL of that server")
    return parser.parse_args()


if __name__ == "__main__":
    main()
