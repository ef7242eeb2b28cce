"""Passkey retrieval: a five-digit number hidden in filler, and whether a compressed cache still tells it.

The plain form of Mohtashami and Jaggi (arXiv 2305.16300): one sentence with the number at some depth of a text that
repeats itself, then the beginning of the answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvdata.client.context import KVCacheContext
from kvdata.datasets.ingest import Progress
from kvdata.datasets.prefixes import Tokenizer
from kvdata.errors import InvalidRequest
from kvdata.evaluation.methods import Method, for_any_prefix
from kvdata.evaluation.offline import TOGETHER, full_key, jobs_of
from kvdata.evaluation.runs import PasskeyRow, Rows
from kvdata.evaluation.subject import Engine, Subject
from kvdata.evaluation.writing import Job, about_full, by_size, store_and_read, through_server

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
SALT = "kvdata-passkey"
_INTRODUCTION = (
    "There is an important piece of information hidden in a lot of irrelevant text. Find it and memorise it.\n"
)
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_NEEDLE = "The pass key is {number}. Remember it. {number} is the pass key. "
_QUESTION = "\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        number: of the prompt: ``depth index + len(DEPTHS) * repetition``.
        depth: share of the prompt before the needle.
        tokens: the prefix ``[T]``, which is cached.
        question: fed after it.
        answer: the tokens of the number.
    """

    number: int
    depth: float
    tokens: Tensor = field(repr=False)
    question: Tensor = field(repr=False)
    answer: Tensor = field(repr=False)


def passkey_prompts(tokenizer: Tokenizer, tokens: int, repetitions: int) -> Iterator[Prompt]:
    """`repetitions` prompts at each of `DEPTHS`, with prefixes of exactly `tokens` tokens; the same each time.

    Raises:
        InvalidRequest: the needle does not fit.
    """
    introduction, filler, question = (_ids(tokenizer, text) for text in (_INTRODUCTION, _FILLER, _QUESTION))
    for number in range(repetitions * len(DEPTHS)):
        depth = DEPTHS[number % len(DEPTHS)]
        digits = f"{random.Random(number).randrange(10_000, 100_000)}"
        needle = _ids(tokenizer, _NEEDLE.format(number=digits))
        room = tokens - len(introduction) - len(needle)
        if room < len(DEPTHS):
            raise InvalidRequest(f"a passkey prompt does not fit into {tokens} tokens; use longer windows")
        # Whole sentences as far as they go: the needle begins where one ends.
        before = int(depth * room) // len(filler) * len(filler)
        text = filler * (room // len(filler) + 1)
        ids = introduction + text[:before] + needle + text[: room - before]
        # The digits as they are tokenised behind the question.
        answer = _ids(tokenizer, f"{_QUESTION} {digits}")[len(question) :]
        yield Prompt(number, depth, torch.tensor(ids), torch.tensor(question), torch.tensor(answer))


def evaluate_passkey(
    engine: Engine,
    ctx: KVCacheContext,
    prompts: Sequence[Prompt],
    methods: Sequence[Method],
    keeps: Sequence[float],
    rows: Rows[PasskeyRow],
    progress: Progress | None = None,
) -> None:
    """Decode the number from every prompt's full cache and from every method's; what `rows` has is left out.

    The model here prefills each prompt, stores it and reads it back, as the windows were; it is deleted afterwards.
    Methods that know some documents only are left out. Errors as `kvdata.evaluation.offline.evaluate`.
    """
    methods = for_any_prefix(methods)
    for prompt in progress(prompts, len(prompts)) if progress else prompts:
        jobs = [
            [job for job in same if (prompt.number, job.method.name, job.method.revision, job.keep) not in rows]
            for same in jobs_of(methods, keeps, len(prompt.tokens), ctx.chunk_size)
        ]
        if any(jobs) or full_key(prompt.number) not in rows:
            for row in _outcomes(engine, ctx, prompt, jobs):
                rows.add(row)


def _outcomes(
    engine: Engine, ctx: KVCacheContext, prompt: Prompt, jobs: Sequence[Sequence[Job]]
) -> Iterator[PasskeyRow]:
    """Of a prompt's full cache, then of its jobs'."""
    ids = prompt.tokens.tolist()
    with ExitStack() as cleaning:
        kv, _ = store_and_read(ctx, engine.prefill(ids).to(ctx.layout.dtype), ids, SALT, cleaning)
        (found,) = retrieves(engine, kv[None], prompt)
        yield PasskeyRow(**about_full(prompt.number, len(ids)), depth=prompt.depth, found=found)
        subject = Subject(engine, kv, prompt.tokens, torch.cat((prompt.question, prompt.answer)), prompt.question)
        for part in (same[start : start + TOGETHER] for same in jobs for start in range(0, len(same), TOGETHER)):
            with through_server(ctx, subject, SALT, part) as caches:
                for cached, stacked in by_size(caches):
                    for cache, found in zip(cached, retrieves(engine, stacked, prompt), strict=True):
                        about = cache.job.about(prompt.number, cache.kv)
                        yield PasskeyRow(**about, depth=prompt.depth, found=found)


def retrieves(engine: Engine, caches: Tensor, prompt: Prompt) -> list[bool]:
    """Whether greedy decoding after each cache ``[B, 2, L, T, D]`` and the question gives the number.

    One forward tells: greedy decoding gives an answer exactly if each of its tokens is the likeliest one after those
    before it.
    """
    fed = torch.cat((prompt.question, prompt.answer[:-1])).expand(len(caches), -1)
    chosen = engine.continue_from(caches, fed)[:, len(prompt.question) - 1 :].argmax(-1).cpu()
    return [bool(same) for same in (chosen == prompt.answer).all(dim=1)]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
