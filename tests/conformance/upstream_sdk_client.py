"""LMCache's own SDK as a client; runs in the environment of an ``lmcache`` command, which has no kvdata.

``python upstream_sdk_client.py JOB`` reads the server's addresses, the model and the steps from a JSON file:
``["store", tokens, salt, file]`` stores the tensor in a file, ``["retrieve", tokens, salt, file]`` writes one there.
It prints one JSON line: the context's instance id, and for each step what the SDK returned (for a tensor: True).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lmcache.sdk import kvcache

TIMEOUT = 20.0


def take(ctx: Any, operation: str, tokens: list[int], salt: str, file: str) -> bool | None:
    if operation == "store":
        return bool(ctx.store(torch.load(file, weights_only=True), tokens, cache_salt=salt))
    found = ctx.retrieve(tokens, cache_salt=salt)
    if found is None:
        return None
    torch.save(found, file)
    return True


def main(job: dict[str, Any]) -> None:
    ctx = kvcache.connect(job["url"], job["http_url"], job["model"], timeout=TIMEOUT)
    try:
        results = [take(ctx, *step) for step in job["steps"]]
    finally:
        ctx.close()
    print(json.dumps({"instance_id": ctx.instance_id, "results": results}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
