"""Many continuations of one cache, sampled together by the model that made it.

Axes: ``2`` K/V, ``L`` layers, ``T`` prefix tokens, ``D = H * head_dim``, ``B`` branches, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from kvdata.engines.hf_cache import to_dynamic_cache
from kvdata.engines.huggingface import HuggingFaceEngine, Tokens
from kvdata.errors import InvalidRequest


@torch.inference_mode()
def first_tokens(
    engine: HuggingFaceEngine, kv: Tensor, last_token: int, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """`count` samples ``[count, 1]`` of the token that follows a cache ``[2, L, T, D]`` whose last token is given."""
    # What comes after a token is only known to a forward over it, so that it is fed again after the rest.
    logits = engine.continue_from(kv[:, :, :-1], [last_token])[0]
    return _draw(logits.expand(count, -1), 1.0, generator).cpu()


@torch.inference_mode()
def sample_continuations(
    engine: HuggingFaceEngine,
    kv: Tensor,
    starts: Sequence[Tokens],
    length: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each of B starts after the same cache, by sampling: ``[B, length]``, the start included.

    All branches are one sequence for the model, with a mask that hides them from each other: the prefix is held and
    read once, not once for each branch (tree attention, SpecInfer, arXiv 2305.09781).

    Args:
        kv: ``[2, L, T, D]``.
        starts: token ids, one or more for each branch.
        length: tokens of each continuation.
        temperature: divides the logits.

    Raises:
        InvalidRequest: a start is empty or longer than `length`.
    """
    given = [torch.as_tensor(start, dtype=torch.long) for start in starts]
    widths = torch.tensor([len(start) for start in given])
    if not given or not 1 <= int(widths.min()) <= int(widths.max()) <= length:
        raise InvalidRequest(f"continuations of {length} tokens need starts of 1 to {length} tokens")
    branches = torch.arange(len(given))
    cache = to_dynamic_cache(kv.to(engine.model.device, engine.model.dtype), engine.layout)
    ids, owner = torch.cat(given), branches.repeat_interleave(widths)
    place = torch.cat([torch.arange(int(width)) for width in widths])
    last = widths.cumsum(0) - 1
    fed = ids
    while (owner == widths.argmin()).sum() < length:
        logits = _tree_forward(engine, cache, fed, owner, place, kv.shape[2])[last]
        fed = _draw(logits, temperature, generator)[:, 0].cpu()
        ids, owner = torch.cat((ids, fed)), torch.cat((owner, branches))
        place = torch.cat((place, widths))
        widths, last = widths + 1, branches
    return torch.stack([ids[owner == branch][:length] for branch in branches])


def _tree_forward(
    engine: HuggingFaceEngine, cache: DynamicCache, fed: Tensor, owner: Tensor, place: Tensor, prefix: int
) -> Tensor:
    """Logits ``[fed, V]``; each fed token sees the prefix, and its own branch up to itself."""
    new = slice(len(owner) - len(fed), None)
    own = (owner[new, None] == owner) & (place[new, None] >= place)
    mask = torch.cat((own.new_ones(len(fed), prefix), own), dim=1)[None, None]
    device = engine.model.device
    positions = (prefix + place[None, new]).to(device)
    return engine.forward(fed[None].to(device), cache, position_ids=positions, attention_mask=mask.to(device))[0]


def _draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One sample of each row ``[B, V]`` -> ``[B, 1]``, by the inverse of the distribution function.

    `torch.multinomial` draws an exponential variate for each token of the vocabulary, which costs more than the model.
    """
    mass = (logits.float() / temperature).softmax(-1).cumsum(-1)
    point = torch.rand(len(logits), 1, generator=generator).to(mass.device) * mass[:, -1:]
    return torch.searchsorted(mass, point).clamp_max(logits.shape[-1] - 1)
