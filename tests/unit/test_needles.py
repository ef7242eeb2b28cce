"""Windows with hidden facts: exact sizes, the same each time, and what is asked for is in the prefix."""

from __future__ import annotations

import mailbox
import re

from kvdata.evaluation import passkey
from tests.unit.tiny_model import tiny_tokenizer
from training.needles import FACTS, MOST_FACTS, PEOPLE, SENTENCES, WORDS, needle_windows
from training.text import package_texts

CONTEXT, CONTINUATION = 600, 300  # a token is a character
TEXT = "".join(f"line {number} of some text; " for number in range(100))
SECRET = r"[0-9]{3,7}|[A-Z]{2}-[0-9]{3,4}|" + "|".join(WORDS)


def windows(count: int = 40):
    tokenizer = tiny_tokenizer()
    made = needle_windows(tokenizer, [TEXT, "too short"], CONTEXT, CONTINUATION, count)
    read = ["".join(tokenizer.convert_ids_to_tokens([*r.tokens, *r.continuation])) for r in made]
    return [(text[:CONTEXT], text[CONTEXT:], record) for text, record in zip(read, made, strict=True)]


def told(prefix: str) -> list[tuple[int, str]]:
    """Which facts a prefix tells, and their secrets."""
    found = []
    for number, (statement, _) in enumerate(FACTS):
        pattern = (
            re.escape(statement).replace(r"\{who\}", f"(?:{'|'.join(PEOPLE)})").replace(r"\{what\}", f"({SECRET})")
        )
        found += [(number, secret) for secret in re.findall(pattern, prefix)]
    return found


def test_windows_have_their_size_and_are_the_same_each_time() -> None:
    made = windows()
    assert {(len(r.tokens), len(r.continuation)) for _, _, r in made} == {(CONTEXT, CONTINUATION)}
    assert [r.meta["name"] for _, _, r in made] == [f"needles {number}" for number in range(40)]
    assert [text for text, _, _ in windows(10)] == [text for text, _, _ in made[:10]]
    assert len({text for text, _, _ in made}) == 40


def test_a_continuation_tells_what_its_prefix_hides() -> None:
    counts, depths = set(), []
    for prefix, following, _ in windows():
        facts = told(prefix)
        assert facts
        counts.add(len(facts))
        for _, secret in facts:
            assert secret in following
            depths.append(prefix.index(secret) / CONTEXT)
    assert max(counts) >= 3
    assert max(counts) <= MOST_FACTS
    assert min(depths) < 0.1
    assert max(depths) > 0.9


def test_every_second_window_repeats_sentences_and_the_others_are_pieces_of_the_texts() -> None:
    for number, (prefix, _, _) in enumerate(windows(12)):
        sentences = sum(prefix.count(sentence) for sentence in SENTENCES)
        assert sentences > 10 if number % 2 == 0 else sentences == 0
        assert (prefix.count("of some text") > 10) == (number % 2 == 1)


def test_nothing_is_worded_as_in_the_evaluation() -> None:
    judged = " ".join((passkey._INTRODUCTION, passkey._FILLER, passkey._NEEDLE, passkey._QUESTION)).lower()
    ours = " ".join((*SENTENCES, *(text for fact in FACTS for text in fact))).lower()
    assert "pass key" not in ours
    assert "passkey" not in ours
    for sentence in SENTENCES:
        assert sentence.lower() not in judged
    for sentence in re.findall(r"[^.\n?]+[.?]", passkey._INTRODUCTION + passkey._FILLER + passkey._NEEDLE):
        assert sentence.strip().lower() not in ours


def test_texts_for_the_haystack_are_those_of_packages_alone() -> None:
    texts = package_texts()
    assert any("asyncio" in text for text in texts)
    assert not any(mailbox.__doc__ in text for text in texts)
