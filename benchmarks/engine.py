"""A serving engine's registration without the engine; runs in the environment of an ``lmcache`` command.

``python engine.py URL MODEL:LAYERS:HEADS:HEAD_DIM ...`` shares small paged caches with an LMCache server, as vLLM's
connector does where LMCache moves the blocks, in a layout with separate K and V (``NL_X_TWO_NB_BS_NH_HS``): LMCache's
SDK connects only to a model that is registered so. It stores nothing, prints ``registered``, and un-registers when its
standard input ends.
"""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path

import torch
import zmq
from lmcache.v1.gpu_connector.utils import LayoutHints
from lmcache.v1.multiprocess.transfer_context.worker_transfer import TransferContext, create_transfer_context
from lmcache.v1.multiprocess.transfer_mode import MPTransferMode
from lmcache.v1.multiprocess.transport.base import RequestClient
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

BLOCKS, BLOCK_SIZE = 2, 16
TIMEOUT = 30.0


def register(client: RequestClient, model: str, layers: int, heads: int, head_dim: int) -> TransferContext:
    """Share a cache of ``[2, blocks, block, H, S]`` per layer, all in one buffer, as bfloat16."""
    buffer = torch.zeros(layers, 2, BLOCKS, BLOCK_SIZE, heads, head_dim, dtype=torch.bfloat16)
    caches = {f"layer.{i}": layer for i, layer in enumerate(buffer)}
    hints = LayoutHints(kv_layout="NHD", num_kv_heads=heads, tokens_per_block=BLOCK_SIZE, head_dim=head_dim)
    instance = uuid.uuid4().int & ((1 << 63) - 1)
    context = create_transfer_context(
        caches, instance_id=instance, req_client=client, mode=MPTransferMode.LMCACHE_DRIVEN
    )
    context.register(caches, model, 1, 1, TIMEOUT, layout_hints=hints)
    # The server has mapped it: without its name nothing stays behind, however this process ends.
    for name in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
        name.unlink()
    return context


def main(url: str, *models: str) -> None:
    client = RequestClientFactory.create(url, context=zmq.Context())
    contexts = []
    try:
        for model in models:
            name, *geometry = model.split(":")
            contexts.append(register(client, name, *map(int, geometry)))
        print("registered", flush=True)
        sys.stdin.read()
        for context in contexts:
            context.unregister().result(timeout=TIMEOUT)
    finally:
        for context in contexts:
            context.close()
        client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
