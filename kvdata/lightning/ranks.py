"""What the ranks of a Trainer agree on; every rank must call these."""

from __future__ import annotations

from typing import Any

import torch

from kvdata.errors import StoreFailed


def agree(trainer: Any, error: StoreFailed | None) -> None:
    """Go on when no rank has an error; else raise, on every rank, that of the first which has one.

    The wait for the others is limited by the strategy's own time-out.

    Raises:
        StoreFailed: or the kind of it that the rank has; or another rank is gone.
    """
    strategy = trainer.strategy
    try:
        if strategy.reduce_boolean_decision(error is None):
            return
        errors = [strategy.broadcast(error, src=rank) for rank in range(trainer.world_size)]
    except RuntimeError as exc:  # what torch.distributed raises when a peer has ended
        raise StoreFailed(
            f"another rank ended before all agreed that their caches are stored; see its error ({exc})"
        ) from (error or exc)
    rank, found = next((rank, found) for rank, found in enumerate(errors) if found is not None)
    raise (type(found)(f"rank {rank}: {found}") if len(errors) > 1 else found) from error


def total(trainer: Any, value: int) -> int:
    """Sum of every rank's ``value``."""
    own = torch.tensor(value, dtype=torch.int64, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(own, reduce_op="sum"))
