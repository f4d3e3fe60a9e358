"""Label scores for any mixture of tasks in one pass: what validation, prediction and serving share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qtuning.backbones import AnswerSet, Backbone, Head, Row, Tokens

BATCH_TOKENS = {"cpu": 4096}
"""Padded positions of one forward pass: on a CPU small enough for its cache, …"""
CARD_TOKENS = 65536
"""… on a card large enough to fill it."""


@dataclass(frozen=True)
class Answerer:
    """Everything a backbone needs to answer one task."""

    layout: Tensor
    """[rows, d] prompt vectors that stand before the text."""
    answers: AnswerSet
    head: Head | None = None


@dataclass(frozen=True)
class Query:
    """One text for one task."""

    answerer: Answerer
    tokens: Tokens


def score(backbone: Backbone, queries: Sequence[Query]) -> list[Tensor]:
    """Log-probabilities [labels] of each query's own labels, in the order of the queries."""
    results: list[Tensor | None] = [None] * len(queries)
    for batch in batches_by_length([_length(query) for query in queries], backbone):
        scored = _score_batch(backbone, [queries[i] for i in batch])
        for i, found in zip(batch, scored, strict=True):
            results[i] = found
    return [found for found in results if found is not None]


def exact_matches(
    backbone: Backbone, queries: Sequence[Query], gold: Sequence[int], max_tokens: int | None = None
) -> list[bool]:
    """Whether greedy generation would write exactly the gold label, found by teacher forcing.

    Greedy output equals the gold tokens if and only if, reading gold, the most likely token is the
    gold one at every position, the end token included. `max_tokens` compares only the first tokens,
    as generation with a length limit does.
    """
    results = [False] * len(queries)
    for batch in batches_by_length([_length(query) for query in queries], backbone):
        golden = [queries[i].answerer.answers.sequences[gold[i]] for i in batch]
        sequences = [backbone.closed(sequence)[:max_tokens] for sequence in golden]
        bank, starts = _bank([queries[i].answerer for i in batch])
        rows = [
            Row(queries[i].tokens, starts[id(queries[i].answerer)], len(queries[i].answerer.layout), (s[:-1],))
            for i, s in zip(batch, sequences, strict=True)
        ]  # fmt: skip
        with torch.no_grad():
            hidden = backbone.hidden(rows, bank)
            for k, (i, sequence) in enumerate(zip(batch, sequences, strict=True)):
                states = hidden[k : k + 1, : len(sequence)]
                best = backbone.logits(states, queries[i].answerer.head).argmax(dim=-1)[0]
                results[i] = best.tolist() == list(sequence)
    return results


def batches_by_length(lengths: Sequence[int], backbone: Backbone) -> list[list[int]]:
    """Indices in batches of like length, longest first, each at most the device's number of padded positions."""
    budget = BATCH_TOKENS.get(backbone.device.type, CARD_TOKENS)
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > budget:
            batches.append([])
        batches[-1].append(i)
    return batches


def _length(query: Query) -> int:
    answers = query.answerer.answers
    return len(query.answerer.layout) + len(query.tokens.ids) + answers.longest


def _bank(answerers: Sequence[Answerer]) -> tuple[Tensor, dict[int, int]]:
    """All layouts one under another, each once, and the first row of each."""
    starts: dict[int, int] = {}
    layouts: list[Tensor] = []
    size = 0
    for answerer in answerers:
        if id(answerer) not in starts:
            starts[id(answerer)] = size
            layouts.append(answerer.layout)
            size += len(answerer.layout)
    return torch.cat(layouts), starts


@torch.no_grad()
def _score_batch(backbone: Backbone, queries: Sequence[Query]) -> list[Tensor]:
    bank, starts = _bank([query.answerer for query in queries])
    rows = [
        Row(q.tokens, starts[id(q.answerer)], len(q.answerer.layout), q.answerer.answers.paths)
        for q in queries
    ]
    hidden = backbone.hidden(rows, bank)
    firsts = [0]
    for row in rows:
        firsts.append(firsts[-1] + len(row.paths))
    results: list[Tensor | None] = [None] * len(queries)
    members: dict[int, list[int]] = {}
    for i, query in enumerate(queries):
        members.setdefault(id(query.answerer), []).append(i)
    for group in members.values():  # one head or label set at a time
        answerer = queries[group[0]].answerer
        width = max(len(path) for path in answerer.answers.paths) + 1
        states = torch.cat([hidden[firsts[i] : firsts[i + 1], :width] for i in group])
        logs = F.log_softmax(backbone.logits(states, answerer.head), dim=-1)
        per_path = logs.reshape(len(group), len(answerer.answers.paths), *logs.shape[1:])
        labels = F.log_softmax(answerer.answers.log_probs(per_path), dim=-1)
        for i, found in zip(group, labels, strict=True):
            results[i] = found
    return [found for found in results if found is not None]
