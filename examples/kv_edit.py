"""Edit a cached prefix in flight: connect, retrieve, edit, store.

    kvdata serve --chunk-size 64 &
    kvdata ingest prefixes.jsonl --model smollm2
    python examples/kv_edit.py prefixes.jsonl path/to/model

Keeps the half of the first prefix's tokens whose keys are least alike, per layer and head, and stores the smaller
cache under an address of its own. An engine on the same server decodes from it when it is asked for the printed
number of prompt tokens with the printed salt.
"""

import json
import sys
from pathlib import Path

import kvdata
from kvdata.edits.address import compressed_address
from kvdata.edits.policies import KeyDiff, apply_policy
from kvdata.edits.rope import Rope


def main(prefix_file: str, model_folder: str, url: str, http_url: str) -> None:
    prefixes = kvdata.Prefixes.from_jsonl(prefix_file)
    assert prefixes.model_name is not None  # `kvdata ingest` has written it
    ctx = kvdata.connect(url, http_url, prefixes.model_name, layout=prefixes.layout)

    tokens = prefixes[0].tokens
    kv = kvdata.retrieve(ctx, tokens)  # [2, L, hit, D] or None
    if kv is None:
        sys.exit("the first prefix is not cached; run `kvdata ingest` first")

    config = json.loads((Path(model_folder) / "config.json").read_text())
    keep = kv.shape[2] // 2 // ctx.chunk_size * ctx.chunk_size  # a server stores whole chunks
    smaller, _ = apply_policy(KeyDiff(), kv, keep, Rope.from_config(config), ctx.layout.num_kv_heads)

    address, salt = compressed_address(tokens[: kv.shape[2]].tolist(), keep, policy="keydiff")
    new = kvdata.store(ctx, smaller, address, cache_salt=salt)
    print(f"{kv.shape[2]} -> {keep} tokens, {'stored' if new else 'already there'} under salt {salt}")
    kvdata.close(ctx)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 5):
        sys.exit(f"usage: {sys.argv[0]} PREFIX_FILE MODEL_FOLDER [ZMQ_URL HTTP_URL]")
    main(*sys.argv[1:3], *(sys.argv[3:5] or ("tcp://localhost:5555", "http://localhost:8080")))
