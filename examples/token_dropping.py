"""Prefill long prompts, drop half of their caches, decode from the rest: what it gains, and what it costs.

Needs a running LMCache server and a vLLM on it (docs/migrating.md shows both commands), and the model's folder:

    python examples/token_dropping.py path/to/model --engine http://localhost:8000 --policy keydiff --keep 0.5 0.25

``--policy learned`` takes a trained scorer with ``--checkpoint``. Both arms decode from caches that the server holds;
start vLLM with --no-enable-prefix-caching, or the full arm is answered from the engine's own memory.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import kvdata
from kvdata.edits import functions
from kvdata.sdk.batch import LMCacheBatchedStream
from kvdata.sdk.stream import PostCompletion, create_request

POLICIES = {
    "middle-chunks": functions.drop_middle_chunks,
    "random": functions.random,
    "recency": functions.sinks_and_recency,
    "key-norm": functions.key_norm,
    "keydiff": functions.keydiff,
    "value-norm": functions.value_norm,
}


def compare(
    ctx: kvdata.KVCacheContext,
    engine: PostCompletion,
    prompts: Sequence[list[int]],
    edit: functions.Edit,
    max_tokens: int,
) -> float:
    """Decode every prompt from its full and from its edited cache; returns the gain in throughput."""
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}

    def batch() -> LMCacheBatchedStream:
        made = LMCacheBatchedStream()
        for prompt in prompts:
            made.add(create_request(ctx, engine, prompt))
        return made

    full, edited = batch(), batch()
    print(full.prefill(params))
    full_decode = full.decode(params)

    edited.prefill(params)  # all hits: it only makes the streams alike
    print(edited.modify(edit))
    edited_decode = edited.decode(params)
    print(f"full cache: {full_decode}\nedited cache: {edited_decode}\n")

    gain = edited_decode.output_tput / full_decode.output_tput
    print(f"full:   {full.streams[0].output_text!r}\nedited: {edited.streams[0].output_text!r}")
    print(f"keep {edit.keep:g}: {full_decode.output_tput:.1f} -> {edited_decode.output_tput:.1f} tokens/s, {gain:.2f}x")
    return gain


def main() -> None:
    from transformers import AutoTokenizer

    from kvdata.engines.openai import openai_completion
    from kvdata.evaluation import save_gain_plot

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder with the model's config.json and tokenizer")
    parser.add_argument("--name", help="name under which vLLM registered the model; default: the folder as given")
    parser.add_argument("--served-name", help="vLLM's --served-model-name; default: as --name")
    parser.add_argument("--url", default="tcp://localhost:6555", help="LMCache, ZMQ")
    parser.add_argument("--http-url", default="http://localhost:8080", help="LMCache, HTTP")
    parser.add_argument("--engine", default="http://localhost:8000", help="vLLM, OpenAI API")
    parser.add_argument("--packing", default="auto", help="byte order of a fused cache")
    parser.add_argument("--policy", choices=[*POLICIES, "learned"], default="middle-chunks")
    parser.add_argument("--checkpoint", type=Path, help="a saved TokenScorer, for --policy learned")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5], help="shares of tokens kept")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--plot", type=Path, default=Path("runs/token-dropping.png"), help="gain over the keep ratio")
    options = parser.parse_args()

    config = json.loads((options.model / "config.json").read_text())
    if options.policy != "learned":
        edits = [POLICIES[options.policy](config, keep) for keep in options.keep]
    elif options.checkpoint is None:
        parser.error("--policy learned needs --checkpoint")
    else:
        edits = [functions.learned(options.checkpoint, config, keep) for keep in options.keep]

    text = "\n\n".join(topics.values())  # Python's own language reference
    ids = AutoTokenizer.from_pretrained(options.model)(text, verbose=False)["input_ids"]
    length = options.prompt_tokens
    prompts = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)][: options.prompts]

    name = options.name or str(options.model)
    with (
        kvdata.connect(options.url, options.http_url, name, packing=options.packing, model_config=config) as ctx,
        openai_completion(options.engine, options.served_name or name) as engine,
    ):
        gains = {edit.keep: compare(ctx, engine, prompts, edit, options.max_tokens) for edit in edits}
    title = f"Decoding {len(prompts)} prompts of {length} tokens from edited caches"
    save_gain_plot({options.policy: gains}, options.plot, title)
    print(f"plot: {options.plot}")


if __name__ == "__main__":
    main()
