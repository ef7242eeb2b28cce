"""Windows that hide facts in other text and ask for them afterwards: what plain text does not teach a token scorer.

A fact that nobody has asked for yet draws little attention, so that a scorer of plain windows learns to drop it. Here
the continuation asks for what was hidden: codes, numbers, names and words, in text that has nothing to do with them, or
in sentences that come again and again. Neither the sentences nor the wording are those of `kvdata evaluate`'s passkeys.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from kvdata.datasets import Prefixes
from kvdata.datasets.prefixes import Tokenizer

WINDOWS = 32
MOST_FACTS = 4

SENTENCES = (
    "A train left the station.",
    "Bread is baked in the morning.",
    "Birds sat on the wire and were silent.",
    "Rain fell on the roof all night.",
    "The farmer closed the gate.",
    "We walked along the river.",
    "Nobody answered the letter.",
    "The lamp in the hall was on.",
    "Some books were left on the shelf.",
    "They waited for the bus again.",
    "The coffee was cold.",
    "Snow covers the hills in winter.",
    "The dog slept under the table.",
    "A boat crossed the lake.",
    "Music came from the other room.",
    "It was late, and the shop was closed.",
)
"""Haystacks of the first kind repeat a few of these."""

FACTS = (
    ("The access code of {who} is {what}.", "What is the access code of {who}? It is {what}."),
    ("{who}'s phone number is {what}.", "{who}'s phone number is {what}."),
    ("Room {what} was given to {who}.", "Question: which room was given to {who}?\nAnswer: {what}"),
    ("Note for later: {who} has locker {what}.", "Which locker does {who} have? Locker {what}."),
    ("The word that {who} chose is {what}.", "Tell me the word that {who} chose: {what}"),
    ("{who} paid {what} dollars.", "Q: How much did {who} pay?\nA: {what} dollars"),
    ("The parcel for {who} has the label {what}. Do not lose it.", "The label of the parcel for {who} is {what}."),
    ("Only {who} knows that the safe opens with {what}.", "The safe opens with {what}."),
    ("{who}: {what}", "{who}: {what}"),
)
"""What is hidden, and how it is asked for and told."""

PEOPLE = ("Anna", "Boris", "Carla", "David", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Karin", "Leon")
WORDS = ("violet", "hammer", "orchid", "lantern", "copper", "walnut", "harbour", "marble", "falcon", "pepper", "saddle")


def needle_windows(
    tokenizer: Tokenizer, texts: Sequence[str], context_tokens: int, continuation_tokens: int, windows: int = WINDOWS
) -> Prefixes:
    """Every second window repeats a few `SENTENCES`, the others are pieces of `texts`; the same each time.

    Each hides one to `MOST_FACTS` facts at random depths. Its continuation goes on with the text, then asks for all of
    them. ``meta["name"]`` is ``needles NUMBER``.
    """
    long = [ids for text in texts if len(ids := _ids(tokenizer, text)) >= context_tokens + continuation_tokens]
    records = []
    for number in range(windows):
        chance = random.Random(number)
        text = _repeated(tokenizer, chance) if number % 2 == 0 or not long else _piece(chance.choice(long), chance)
        tokens, following = _hidden(tokenizer, text, context_tokens, continuation_tokens, chance)
        records.append({"tokens": tokens, "continuation": following, "meta": {"name": f"needles {number}"}})
    return Prefixes.of(records)


def _repeated(tokenizer: Tokenizer, chance: random.Random) -> Iterator[int]:
    """A few sentences without end, in one order or in an order that changes."""
    sentences = [_ids(tokenizer, f" {text}") for text in chance.sample(SENTENCES, chance.randint(2, 6))]
    shuffled = chance.random() < 0.5
    while True:
        for ids in chance.sample(sentences, len(sentences)) if shuffled else sentences:
            yield from ids


def _piece(ids: list[int], chance: random.Random) -> Iterator[int]:
    """From some place of a text on, and from its beginning again at its end."""
    start = chance.randrange(len(ids))
    while True:
        yield from ids[start:]
        start = 0


def _hidden(
    tokenizer: Tokenizer, text: Iterator[int], context_tokens: int, continuation_tokens: int, chance: random.Random
) -> tuple[list[int], list[int]]:
    """A prefix with facts in it, and a continuation that ends with the questions."""
    facts = _facts(chance)
    needles = [_ids(tokenizer, f" {told}") for told, _ in facts]
    asked = [_ids(tokenizer, f"\n{question}") for _, question in chance.sample(facts, len(facts))]
    room = context_tokens - sum(map(len, needles))
    lead = max(0, continuation_tokens - sum(map(len, asked)))
    plain = [next(text) for _ in range(room + lead)]
    tokens, done = [], 0
    for place, needle in zip(sorted(chance.sample(range(room), len(needles))), needles, strict=True):
        tokens += plain[done:place] + needle
        done = place
    following = plain[room:] + [token for ids in asked for token in ids]
    return tokens + plain[done:room], following[:continuation_tokens]


def _facts(chance: random.Random) -> list[tuple[str, str]]:
    """Filled-in `FACTS` about different people, each another one."""
    count = chance.randint(1, MOST_FACTS)
    pairs = zip(chance.sample(FACTS, count), chance.sample(PEOPLE, count), strict=True)
    filled = []
    for (told, asked), who in pairs:
        what = _secret(chance)
        filled.append((told.format(who=who, what=what), asked.format(who=who, what=what)))
    return filled


def _secret(chance: random.Random) -> str:
    """A number of three to seven digits, a code of letters and digits, or a word."""
    digits = str(chance.randrange(10 ** (size := chance.randint(2, 6)), 10 ** (size + 1)))
    letters = "".join(chance.sample("ABCDEFGHKLMNPRSTUVWXYZ", 2))
    return chance.choice([digits, digits, f"{letters}-{digits[:4]}", chance.choice(WORDS)])


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
