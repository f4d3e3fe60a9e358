"""The texts that ship with the project: counts, no duplicates, no near-duplicates across splits."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest

from qtuning.data import load_task
from qtuning.errors import ConfigError
from qtuning.streams import get_stream, list_cards, list_streams

CARDS = {name: card for name, card in list_cards().items() if card.file}
NAMES = list(CARDS)


def normalised(text: object) -> str:
    whole = " ".join(text) if isinstance(text, tuple) else str(text)
    return " ".join(re.sub(r"[^a-z0-9 ]", " ", whole.lower()).split())


def trigrams(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)} or {tuple(words)}


def test_enough_tasks_classes_and_groups() -> None:
    assert len(CARDS) >= 12
    assert sum(len(card.labels) for card in CARDS.values()) >= 40
    assert all(2 <= len(card.labels) <= 6 for card in CARDS.values())
    groups = Counter(card.group for card in CARDS.values())
    assert groups["sentiment"] == 3
    assert groups["intents"] == 3
    assert groups["pairs"] == 2
    assert all(card.licence == "CC0-1.0" for card in CARDS.values())


@pytest.mark.parametrize("name", NAMES)
def test_counts_of_every_part(name: str) -> None:
    task = load_task(name)
    counts = Counter(zip(task.splits, task.labels, strict=True))
    for label in task.label_names:
        assert [counts[part, label] for part in ("train", "validation", "test")] == [16, 12, 32]
    split = task.split(16)
    assert split.notes == ()
    assert split.sizes["train"] == 16 * len(task.label_names)


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_varied(name: str) -> None:
    task = load_task(name)
    texts = [normalised(text) for text in task.texts]
    assert len(set(texts)) == len(texts)
    lengths = [len(text.split()) for text in texts]
    assert max(lengths) >= 2.5 * min(lengths)
    openings = Counter(tuple(text.split()[:2]) for text in texts)
    assert openings.most_common(1)[0][1] <= 0.06 * len(texts)


def test_no_near_duplicates_across_splits() -> None:
    """Also between tasks: what one task trains on, another must not test."""
    rows = [
        (part, trigrams(normalised(text)), name)
        for name in NAMES
        for task in [load_task(name)]
        for part, text in zip(task.splits, task.texts, strict=True)
    ]
    by_trigram: dict[tuple[str, ...], list[int]] = {}
    for i, (_, grams, _) in enumerate(rows):
        for gram in grams:
            by_trigram.setdefault(gram, []).append(i)
    pairs = {pair for found in by_trigram.values() for pair in itertools.combinations(found, 2)}
    for i, j in pairs:
        (part_i, a, _), (part_j, b, _) = rows[i], rows[j]
        if part_i != part_j:
            assert len(a & b) / len(a | b) < 0.4, (rows[i], rows[j])


def test_streams_name_known_tasks() -> None:
    assert {"demo", "starter"} <= set(list_streams())
    assert set(get_stream("starter").tasks) == set(NAMES)
    assert len(get_stream("demo").tasks) >= 8
    with pytest.raises(ConfigError, match="Did you mean 'starter'"):
        get_stream("startr")
    with pytest.raises(ConfigError, match="Did you mean 'intent-bank'"):
        load_task("intent-bnk")
