"""Label scores for any mixture of tasks in one pass: what validation, prediction and serving share."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qtuning.backbones import AnswerSet, Backbone, Head, Reading, Row, Tokens
from qtuning.backbones.extents import Extent, prompts_of
from qtuning.backbones.prefixes import Prefixes, PromptMemory
from qtuning.errors import in_a_line

CPU_TOKENS = 4096
"""Positions of one forward pass, padding included: on a CPU small enough for its cache, …"""
CARD_TOKENS = 65536
"""… on a card large enough to fill it, …"""
CARD_BYTES_PER_NUMBER = 64
"""… and small enough for a quarter of its memory: bytes per position and unit of width, on the safe side."""

FEW_ROWS = 4
"""Which a CPU reads padded: what a line saves is less than the work of making one."""
FEW_PATHS = 16
"""Of a row that a CPU reads in a line, at most, where they could stand beside their text."""
MOST_LOGITS = 2**27
"""Numbers of a vocabulary's logits that exist at the same time."""


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


class AnswererTable:
    """Tasks side by side on the device: all layouts in one bank, all heads in one stack. Built once, asked often."""

    def __init__(self, answerers: Sequence[Answerer]):
        self.answerers = answerers
        self.bank, self.slots = _bank(answerers)
        self.answers = [answerer.answers for answerer in answerers]
        heads = [answerer.head for answerer in answerers if answerer.head]
        self.heads = stack_heads(heads) if heads else None
        self._prefixes: Prefixes | None = None

    def remember_prompts(self, memory: PromptMemory) -> None:
        """Let a causal model read every prompt once; pays when there are many questions to come."""
        layouts = [answerer.layout for answerer in self.answerers]
        if all(map(len, layouts)):
            self._prefixes = Prefixes(memory, layouts)

    def log_probs(
        self, backbone: Backbone, tokens: Sequence[Tokens], asked: Sequence[int]
    ) -> list[Tensor]:
        """Log-probabilities [labels of its task] of each text; `asked` says which task it is for."""
        found = self.padded_log_probs(backbone, tokens, asked)
        sizes = [len(self.answers[i].sequences) for i in asked]
        return [line[:size] for line, size in zip(found, sizes, strict=True)]

    def padded_log_probs(
        self,
        backbone: Backbone,
        tokens: Sequence[Tokens],
        asked: Sequence[int],
        among_labels: bool = True,
    ) -> Tensor:
        """The same in one tensor [texts, most labels of those asked], -inf past a task's own; see `Quiz.log_probs`."""
        quiz = Quiz(backbone, tokens, asked, self.slots, self.answers, self._prefixes)
        return quiz.log_probs(self.bank, self.heads, among_labels)


class Quiz:
    """Queries as tensors, in batches of like length or in lines: built once, answered as often as prompts change."""

    def __init__(
        self,
        backbone: Backbone,
        tokens: Sequence[Tokens],
        asked: Sequence[int],
        slots: Sequence[Sequence[int]],
        answers: Sequence[AnswerSet],
        prefixes: Prefixes | None = None,
    ):
        """`asked` says, for each text, which of the tasks with these slots and answers it is for.

        With `prefixes` the slots are not read again with every text.
        """
        self.backbone, self.prefixes = backbone, prefixes
        sizes = [len(each.sequences) for each in answers]
        self.labels = torch.tensor(sizes, device=backbone.device)
        self.widest = max((sizes[i] for i in asked), default=0)
        rows = [
            Row(t, slots[i], answers[i].paths) for t, i in zip(tokens, asked, strict=True)
        ]  # fmt: skip
        paths = [len(row.paths) for row in rows]
        in_line = [] if prefixes else read_in_lines(backbone, paths)
        padded = sorted({*range(len(rows))} - {*in_line})
        steps = [answers[asked[i]].longest for i in padded]
        # rows with one path are read by faster kernels, but the few texts of a request had better stay together
        batches = _padded_batches(backbone, [rows[i] for i in padded], steps, apart=not prefixes)
        ways = [
            (in_line, batches_in_lines([rows[i] for i in in_line], backbone)),
            (padded, batches),
        ]
        if prefixes:
            rows = [Row(row.tokens, (), row.paths) for row in rows]
        self.batches = [
            _QuizBatch.build(
                backbone, [own[k] for k in batch], rows, asked, answers, own is in_line
            )
            for own, its in ways
            for batch in its
        ]
        self.size = len(rows)

    @torch.no_grad()
    def log_probs(self, bank: Tensor, heads: Head | None, among_labels: bool = True) -> Tensor:
        """[queries, most labels of those asked], -inf past the labels of a query's task.

        Args:
            bank: [rows, d] prompt vectors, in which the slots lie.
            heads: Those of an encoder's tasks, stacked: [tasks, most labels, h].
            among_labels: Whether one of the labels must be it; else of label words among all words.
        """
        found = torch.full((self.size, self.widest), -torch.inf, dtype=self.backbone.lane_dtype)
        found = found.to(bank.device)
        for batch in self.batches:
            hidden = self._hidden(batch, bank)
            if heads is not None:
                weight, bias = heads.weight[:, : self.widest], heads.bias[:, : self.widest]
                own = Head(weight[batch.task], bias[batch.task])
                raw = self.backbone.logits(hidden[:, None], own)[:, 0, 0]
            else:
                raw = self._words(batch, hidden)
            columns = torch.arange(raw.shape[1], device=raw.device)
            raw = raw.where(columns < self.labels[batch.task][:, None], -torch.inf)
            found[batch.place, : raw.shape[1]] = F.log_softmax(raw, dim=-1) if among_labels else raw
        return found

    def _hidden(self, batch: _QuizBatch, bank: Tensor) -> Tensor:
        """Read-outs [p, t, h]; from compiled layers where they were compiled for all lengths from the beginning."""
        backbone = self.backbone
        if self.prefixes:
            return backbone.hidden_after(batch.reading, self.prefixes, batch.task)
        if not backbone.scores_compiled:
            return backbone.hidden(batch.reading, bank)
        try:
            with backbone.training_layers():
                return backbone.hidden(batch.reading, bank)
        except torch.OutOfMemoryError:
            raise  # without compiling it would need more
        except Exception as error:
            said = in_a_line(error)
        # out here, so that nothing of the failed pass stays in memory
        warnings.warn(f"{backbone.name!r} is scored without compiling ({said}).", stacklevel=2)
        backbone.may_score_compiled = False
        return backbone.hidden(batch.reading, bank)

    def _words(self, batch: _QuizBatch, hidden: Tensor) -> Tensor:
        """Log-probabilities of label words [n, labels] from read-outs [p, t, h]."""
        at_once = max(1, MOST_LOGITS // (hidden.shape[1] * self.backbone.vocabulary_size))
        chunks = []
        for states, tokens in zip(
            torch.split(hidden, at_once), torch.split(batch.tokens, at_once), strict=True
        ):
            logits = self.backbone.logits(states, None)
            chunks.append(logits.gather(-1, tokens) - logits.logsumexp(dim=-1, keepdim=True))
        per_path = torch.cat(chunks)  # [p, t, labels]
        # a label's tokens are read on one path of its row: the others count as 0
        kept = per_path.where(batch.is_read, 0).sum(dim=1)
        if batch.reading.is_single:
            return kept
        found = kept.new_zeros(len(batch.place), kept.shape[1])
        return found.index_add_(0, batch.reading.owner, kept)


@dataclass(frozen=True)
class _QuizBatch:
    """Some queries, and where their labels are read."""

    reading: Reading
    place: Tensor
    """[n] which query each row is."""
    task: Tensor
    """[n] which task it is for."""
    tokens: Tensor
    """[p, t, labels] token of each label at each step of a path."""
    is_read: Tensor
    """[p, t, labels] whether the label is read there."""

    @classmethod
    def build(
        cls,
        backbone: Backbone,
        places: Sequence[int],
        rows: Sequence[Row],
        asked: Sequence[int],
        answers: Sequence[AnswerSet],
        in_line: bool,
    ) -> _QuizBatch:
        tables = {i: _label_table(answers[i]) for i in {asked[place] for place in places}}
        reading = _prepared(backbone, [rows[place] for place in places], in_line)
        steps = reading.path.shape[1] + 1
        labels = max(table.shape[2] for table in tables.values())
        padded = np.full((len(reading.owner), steps, labels), -1, dtype=np.int64)
        first = 0
        for place in places:
            table = tables[asked[place]]
            padded[first : first + len(table), : table.shape[1], : table.shape[2]] = table
            first += len(table)
        tokens = torch.from_numpy(padded).to(backbone.device)
        which = torch.tensor(list(places), device=backbone.device)
        task = torch.tensor([asked[i] for i in places], device=backbone.device)
        return cls(reading, which, task, tokens.clamp(min=0), tokens >= 0)


def _label_table(answers: AnswerSet) -> np.ndarray:
    """[paths, steps, labels]: the token of each label where it is read, -1 elsewhere."""
    table = np.full((len(answers.paths), answers.longest, len(answers.sequences)), -1, np.int64)
    for label, (sequence, path) in enumerate(zip(answers.sequences, answers.path_of, strict=True)):
        table[path, : len(sequence), label] = sequence
    return table


def exact_matches(
    backbone: Backbone, queries: Sequence[Query], gold: Sequence[int], max_tokens: int | None = None
) -> list[bool]:
    """Whether greedy generation would write exactly the gold label, found by teacher forcing.

    Greedy output equals the gold tokens if and only if, reading gold, the most likely token is the
    gold one at every position, the end token included. `max_tokens` compares only the first tokens,
    as generation with a length limit does.
    """
    results = [False] * len(queries)
    lengths = [
        len(q.answerer.layout) + len(q.tokens.ids) + q.answerer.answers.longest for q in queries
    ]
    for batch in batches_by_length(lengths, backbone):
        asked = [queries[i] for i in batch]
        answerers = list({id(q.answerer): q.answerer for q in asked}.values())
        number = {id(answerer): i for i, answerer in enumerate(answerers)}
        bank, slots = _bank(answerers)
        golden = [queries[i].answerer.answers.sequences[gold[i]] for i in batch]
        sequences = [backbone.closed(sequence)[:max_tokens] for sequence in golden]
        rows = [
            Row(q.tokens, slots[number[id(q.answerer)]], (s[:-1],))
            for q, s in zip(asked, sequences, strict=True)
        ]
        with torch.no_grad():
            hidden = backbone.hidden(backbone.prepare(rows), bank)
            best = backbone.logits(hidden, asked[0].answerer.head).argmax(dim=-1).tolist()
        for i, sequence, written in zip(batch, sequences, best, strict=True):
            results[i] = written[: len(sequence)] == list(sequence)
    return results


@torch.no_grad()
def read_all(backbone: Backbone, rows: Sequence[Row], bank: Tensor) -> Tensor:
    """Read-outs [n, t, h] of rows with one path each, without gradient."""
    longest = max((len(row.paths[0]) for row in rows), default=0) + 1
    shape = (len(rows), longest, backbone.hidden_dim)
    kept = torch.zeros(shape, dtype=backbone.dtype, device=bank.device)
    in_lines = backbone.reads_lines
    if in_lines:
        batches = batches_in_lines(rows, backbone)
    else:
        lengths = [len(row.slots) + len(row.tokens.ids) + len(row.paths[0]) for row in rows]
        batches = batches_by_length(lengths, backbone)
    for batch in batches:
        hidden = backbone.hidden(_prepared(backbone, [rows[i] for i in batch], in_lines), bank)
        kept[torch.tensor(batch, device=kept.device), : hidden.shape[1]] = hidden
    return kept


def stack_heads(heads: Sequence[Head]) -> Head:
    """Heads as one, [tasks, most labels, h], with zeros for labels that a task does not have."""
    most = max(len(head.bias) for head in heads)
    weights = [F.pad(head.weight, (0, 0, 0, most - len(head.bias))) for head in heads]
    biases = [F.pad(head.bias, (0, most - len(head.bias))) for head in heads]
    return Head(torch.stack(weights), torch.stack(biases))


def batches_by_length(
    lengths: Sequence[int],
    backbone: Backbone,
    copies: Sequence[int] | None = None,
    tails: Sequence[tuple[int, int]] | None = None,
    apart: bool = False,
) -> list[list[int]]:
    """Indices in batches of like length, longest first, each at most the device's number of padded positions.

    Args:
        lengths: Positions of each row.
        backbone: Whose device it is.
        copies: How often each row is read, where label words on several paths each need the text again.
        tails: Paths and steps that stand beside each row, padded to the most of its batch; (0, 0) for none.
        apart: Whether rows with a tail share no batch with those without.
    """
    budget = _positions_at_once(backbone)
    own = tails or [(0, 0)] * len(lengths)
    batches: list[list[int]] = []
    full, longest, paths, steps = 0, 0, 0, 0
    for i in sorted(range(len(lengths)), key=lambda i: (own[i], -lengths[i], i)):
        full += copies[i] if copies else 1
        longest = max(longest, lengths[i])
        paths, steps = max(paths, own[i][0]), max(steps, own[i][1])
        is_other = apart and bool(batches) and any(own[batches[-1][0]]) != any(own[i])
        if not batches or is_other or full * (longest + paths * steps) > budget:
            batches.append([])
            full, longest, (paths, steps) = copies[i] if copies else 1, lengths[i], own[i]
        batches[-1].append(i)
    return batches


def read_in_lines(backbone: Backbone, paths: Sequence[int]) -> list[int]:
    """Which of some rows with so many paths each are scored in lines; the others are padded.

    On a CPU many paths are cheaper beside their text, where that can be: in a line each has keys of its own.
    """
    if not backbone.reads_lines:
        return []
    every = list(range(len(paths)))
    if backbone.device.type != "cpu":
        return every
    if backbone.takes_branches:
        few = [i for i in every if paths[i] <= FEW_PATHS]
        return few if len(few) > FEW_ROWS else []
    return every if sum(paths) > FEW_ROWS else []


def batches_in_lines(rows: Sequence[Row], backbone: Backbone) -> list[list[int]]:
    """Indices of rows that share a line: those of one prompt together, as many as the device reads at once."""
    budget, groups = _positions_at_once(backbone), prompts_of(rows)[1]
    batches: list[list[int]] = []
    filled, group = budget, -1
    for i in sorted(range(len(rows)), key=lambda i: (len(rows[i].paths) > 1, groups[i], i)):
        row = rows[i]
        text = len(row.tokens.ids) + sum(map(len, row.paths))
        filled += text + (len(row.slots) if groups[i] != group else 0)
        if filled > budget:
            batches.append([])
            filled = text + len(row.slots)
        group = groups[i]
        batches[-1].append(i)
    return batches


def _padded_batches(
    backbone: Backbone, rows: Sequence[Row], steps: Sequence[int], apart: bool
) -> list[list[int]]:
    """Indices of rows that are padded to the longest of a batch; `steps` are the read-outs of their longest paths."""
    lengths, tails, copies = [], [], []
    takes_branches = backbone.takes_branches
    may_branch = backbone.answer_follows_text and takes_branches
    for row, longest in zip(rows, steps, strict=True):
        paths = len(row.paths)
        branches = may_branch and paths > 1
        lengths.append(len(row.slots) + len(row.tokens.ids) + (0 if branches else paths * longest))
        tails.append((paths, longest) if branches else (0, 0))
        copies.append(1 if takes_branches else paths)
    return batches_by_length(lengths, backbone, copies, tails, apart)


def _positions_at_once(backbone: Backbone) -> int:
    """Of one forward pass."""
    if backbone.device.type != "cuda":
        return CPU_TOKENS
    # of all its memory, not of what is free now: equal calls must make equal batches
    whole = torch.cuda.get_device_properties(backbone.device).total_memory
    return min(CARD_TOKENS, whole // 4 // (CARD_BYTES_PER_NUMBER * backbone.hidden_dim))


def _prepared(backbone: Backbone, rows: Sequence[Row], in_line: bool) -> Reading:
    reading = backbone.prepare(rows)
    return replace(reading, extent=Extent.of(rows, backbone.device)) if in_line else reading


def _bank(answerers: Sequence[Answerer]) -> tuple[Tensor, list[range]]:
    """All layouts one under another, and the rows of each."""
    slots, first = [], 0
    for answerer in answerers:
        slots.append(range(first, first + len(answerer.layout)))
        first += len(answerer.layout)
    layouts = [answerer.layout for answerer in answerers]
    return torch.cat(layouts) if layouts else torch.zeros(0, 0), slots
