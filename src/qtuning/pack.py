"""A pack: lanes of any structure that take their steps in the same passes of one backbone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from qtuning.backbones import Backbone, Head, Row
from qtuning.backbones.extents import Extent, aligned, prompts_of
from qtuning.config import TrainSettings
from qtuning.graphs import StepGraphs
from qtuning.passes import Passes, cut, few_sizes, fits
from qtuning.scoring import Quiz, stack_heads
from qtuning.stack import Batches, Lane, LaneStack, Step, kind_of_step

EXPECTED_STEPS = 1024
"""Steps that are looked ahead: enough for lengths to repeat, and few beside those of a large task."""


def for_each(settings: TrainSettings | Sequence[TrainSettings], lanes: int) -> list[TrainSettings]:
    """The settings of every lane, from those of all of them or from those of each."""
    return [settings] * lanes if isinstance(settings, TrainSettings) else list(settings)


class Pack:
    """Stacks of lanes on one backbone, their training examples on its device."""

    def __init__(
        self,
        backbone: Backbone,
        lanes: Sequence[Lane],
        settings: TrainSettings | Sequence[TrainSettings],
    ):
        """`settings` are those of all lanes, or of each."""
        self.backbone, self.lanes = backbone, list(lanes)
        each = for_each(settings, len(self.lanes))
        self.batch_size = max(own.batch_size for own in each)
        members: dict[tuple[object, ...], list[int]] = {}
        for i, (lane, own) in enumerate(zip(self.lanes, each, strict=True)):
            members.setdefault((lane.structure, kind_of_step(own)), []).append(i)
        self.members = list(members.values())
        """For each stack the lanes in it."""
        self.stacks = [
            LaneStack(backbone, [lanes[i] for i in own], [each[i] for i in own])
            for own in self.members
        ]
        self.places = {i: (s, k) for s, own in enumerate(self.members) for k, i in enumerate(own)}
        """For each lane its stack and its place in it."""
        self.banks = np.cumsum([0, *(stack.rows * len(stack.lanes) for stack in self.stacks)])
        rows: list[Row] = []
        self.tables = []
        for stack, offset in zip(self.stacks, self.banks, strict=False):
            self.tables.append(len(rows))
            rows += stack.table_rows(int(offset))
        self.reading = backbone.prepare(rows)
        follows = backbone.answer_follows_text
        self.lengths = np.array(
            [
                len(r.tokens.ids) + len(r.slots) + (len(r.paths[0]) if follows else 0)
                for r in rows
            ]
        )  # fmt: skip
        prompts, groups = prompts_of(rows)
        self.groups = np.array(groups)
        """The prompt of every row of the table."""
        self.prompts = [len(slots) for slots in prompts]
        """Vectors of every prompt; each stands before equally many rows of a step."""
        self.shortest = [
            min(range(len(lane.train)), key=lambda i: len(lane.train[i].ids)) for lane in self.lanes
        ]
        self.passes: Passes = ()
        """Those of every step that was expected, where steps must have few shapes; …"""
        self.lines: Sequence[int] = ()
        """… or the positions of lines, where rows are read in lines."""
        in_stacks = torch.tensor([i for own in self.members for i in own], device=backbone.device)
        self.order = in_stacks.argsort()
        self.graphs = StepGraphs(backbone.device)
        self.losses: list[Tensor] = []
        """[lanes] for each step since `take_losses`, on the device."""
        self.quizzes: dict[tuple[int, ...], Quiz] = {}
        """Validation rows of some lanes, ready to be asked."""

    # ── training ─────────────────────────────────────────────────────────────────────────────

    def step(self, batches: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        """One optimiser step of every lane with a batch, from the same passes.

        Args:
            batches: Training examples of each lane; none for a lane that stands still.
            counts: Optimiser steps of each lane, this one included.
        """
        step, passes = self.plan(batches, counts)
        if self.has_fixed_shapes:
            self.losses.append(self.graphs.step(self.compute, step, passes))
        else:
            self.losses.append(self.compute(step, passes))

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether a new shape costs time: it is captured, or compiled for."""
        return self.backbone.is_captured or self.backbone.is_compiled

    def plan(self, batches: Sequence[Sequence[int]], counts: Sequence[int]) -> tuple[Step, Passes]:
        """The step's examples as tensors, and the passes that read them."""
        device = self.backbone.device
        examples, rows = self._filled(batches)
        inputs = []
        for own, (example, is_live) in zip(self.members, examples, strict=True):
            count = [counts[i] if batches[i] else 0 for i in own]
            inputs.append(
                Batches(
                    _sent(example, device), _sent(is_live, device), _sent(np.array(count), device)
                )
            )
        in_line = self.backbone.reads_lines  # rows of a prompt together; else longest first
        order = np.argsort(self.groups[rows] if in_line else -self.lengths[rows], kind="stable")
        step = Step(inputs, _sent(rows[order], device), _sent(np.argsort(order), device))
        return step, self._passes(self.lengths[rows[order]])

    def expect(self, ahead: Sequence[Iterable[Sequence[int]]]) -> None:
        """Choose shapes that suit the steps to come, from every lane's batches until it ends: few to capture."""
        if not self.has_fixed_shapes:
            return
        steps = itertools.islice(itertools.zip_longest(*ahead, fillvalue=()), EXPECTED_STEPS)
        found = [-np.sort(-self.lengths[self._filled(batches)[1]]) for batches in steps]
        if self.backbone.reads_lines:
            self.lines = few_sizes([self._line(lengths) for lengths in found])
        else:
            self.passes = self._cut(np.max(found, axis=0)) if found else ()

    def _filled(
        self, batches: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
        """For each stack its examples [lanes, b] and which of them count, and all rows of the table to be read."""
        size = max(len(batch) for batch in batches)
        if self.has_fixed_shapes:
            size = min(self.batch_size, max(len(lane.train) for lane in self.lanes))
        examples, whole, shared = [], [], []
        for stack, own, table in zip(self.stacks, self.members, self.tables, strict=True):
            example = np.empty((len(own), size), dtype=np.int64)
            is_live = np.zeros(example.shape, dtype=bool)
            for k, i in enumerate(own):
                live, start = len(batches[i]), stack.starts[k]
                example[k, :live] = start + np.array(batches[i], dtype=np.int64)
                example[k, live:] = start + self.shortest[i]  # fills it, and counts for nothing
                is_live[k, :live] = True
            examples.append((example, is_live))
            whole.append(table + example.flatten())
            if stack.teacher is not None:
                shared.append(whole[-1] + len(stack.targets))
        return examples, np.concatenate([*whole, *shared])

    def _passes(self, lengths: np.ndarray) -> Passes:
        """Over rows of these lengths, in the order of reading; where shapes are fixed, those that were expected."""
        if self.backbone.reads_lines:  # one pass, and its positions are the line's
            needed = self._line(lengths)
            if self.has_fixed_shapes:
                needed = min(n for n in (*self.lines, self.longest_line) if n >= needed)
            return ((len(lengths), needed),)
        if not self.has_fixed_shapes:
            return self._cut(lengths)
        if sum(rows for rows, _ in self.passes) != len(lengths):
            self.passes = self._cut(lengths)
        if fits(lengths, self.passes):
            return self.passes
        return ((len(lengths), self.backbone.aligned(int(self.lengths.max()))),)  # not expected

    def _cut(self, lengths: np.ndarray) -> Passes:
        backbone = self.backbone
        return tuple((n, backbone.aligned(w)) for n, w in cut(lengths, backbone.device))

    def _line(self, lengths: np.ndarray) -> int:
        """Positions of a line of rows of these lengths: every prompt stands in it once."""
        again = (len(lengths) // len(self.prompts) - 1) * sum(self.prompts)
        return aligned(int(lengths.sum()) - again, self.backbone.device)

    @cached_property
    def longest_line(self) -> int:
        """Positions that are enough for any step: one size for all that nobody expected."""
        longest = np.zeros(len(self.prompts), dtype=np.int64)
        np.maximum.at(longest, self.groups, self.lengths)
        return self._line(np.repeat(longest, self.batch_size))

    def _read(self, rows: Tensor, positions: int, bank: Tensor) -> Tensor:
        """[n, t, h] of these rows of the table, in one pass."""
        if not self.backbone.reads_lines:
            return self.backbone.hidden(self.reading.at(rows, positions), bank)
        own, prompted = self.reading.at(rows, self.reading.width), sum(self.prompts)
        return self.backbone.hidden(replace(own, extent=Extent(positions, prompted)), bank)

    def compute(self, step: Step, passes: Passes) -> Tensor:
        """Losses [lanes] of one step, which is taken. Nothing here waits for the device."""
        with self.backbone.training_layers():
            losses = self.forward(step, passes)
        trained = [(stack, name) for stack in self.stacks for name in stack.trained]
        gradients = torch.autograd.grad(
            losses.sum(), [stack.trained[name] for stack, name in trained], allow_unused=True
        )
        changes: list[tuple[Tensor, Tensor]] = []
        for stack, batch in zip(self.stacks, step.batches, strict=True):
            own = {
                name: gradient if gradient is not None else torch.zeros_like(stack.trained[name])
                for (of, name), gradient in zip(trained, gradients, strict=True)
                if of is stack
            }
            changes += stack.moved(own, batch.count)
        with torch.no_grad():
            for tensor, value in changes:
                tensor.copy_(value)
        return losses.detach()

    def forward(self, step: Step, passes: Passes) -> Tensor:
        """Losses [lanes] with their graph, in the order of the lanes."""
        bank = torch.cat([stack.bank() for stack in self.stacks])
        rows = torch.split(step.rows, [count for count, _ in passes])
        read = [
            self._read(own, positions, bank)
            for own, (_, positions) in zip(rows, passes, strict=True)
        ]
        sizes = [batch.example.numel() for batch in step.batches]
        again_sizes = [
            n for n, stack in zip(sizes, self.stacks, strict=True) if stack.teacher is not None
        ]
        in_place = torch.cat(read).index_select(0, step.place)
        parts = torch.split(in_place, [*sizes, *again_sizes])
        found, again = [], iter(parts[len(sizes) :])
        for stack, batch, own in zip(self.stacks, step.batches, parts, strict=False):
            found.append(
                stack.losses(own, next(again) if stack.teacher is not None else None, batch)
            )
        return torch.cat(found)[self.order]

    def take_losses(self) -> np.ndarray:
        """[steps, lanes] since the last call; waits for the device."""
        found = torch.stack(self.losses).cpu().double().numpy()
        self.losses.clear()
        return found

    # ── validation ───────────────────────────────────────────────────────────────────────────

    def validate(self, due: Sequence[int]) -> list[tuple[list[int], float]]:
        """For each of these lanes its predictions on its validation rows, and the mean log-likelihood."""
        key = tuple(due)
        if key not in self.quizzes:
            tokens = [each for i in due for each in self.lanes[i].validation]
            asked = [i for i in due for _ in self.lanes[i].validation]
            answers = [lane.answers for lane in self.lanes]
            slots = [self.slots(i) for i in range(len(self.lanes))]
            self.quizzes[key] = Quiz(self.backbone, tokens, asked, slots, answers)
        with torch.no_grad():
            bank = torch.cat([stack.bank(stack.averaged) for stack in self.stacks])
        found = self.quizzes[key].log_probs(bank, self._heads())
        gold = torch.tensor(
            [label for i in due for label in self.lanes[i].validation_labels], device=found.device
        )
        likelihood = found.gather(1, gold[:, None]).squeeze(1).double().cpu()
        guesses = found.argmax(dim=-1).tolist()
        results, first = [], 0
        for i in due:
            last = first + len(self.lanes[i].validation_labels)
            results.append((guesses[first:last], float(likelihood[first:last].mean())))
            first = last
        return results

    def slots(self, lane: int) -> list[int]:
        """Rows of the pack's bank that make up a lane's layout."""
        s, k = self.places[lane]
        return [int(self.banks[s]) + slot for slot in self.stacks[s].slots(k)]

    def _heads(self) -> Head | None:
        """Heads of all lanes, in their order, padded to the most classes."""
        if not self.backbone.needs_head:
            return None
        heads = []
        for i in range(len(self.lanes)):
            s, k = self.places[i]
            own = self.stacks[s].heads(self.stacks[s].averaged)
            assert own is not None
            heads.append(Head(own.weight.detach()[k], own.bias.detach()[k]))
        return stack_heads(heads)

    # ── one lane ─────────────────────────────────────────────────────────────────────────────

    def keep_best(self, better: Sequence[int]) -> None:
        """Remember the present state of these lanes as their best."""
        for s, stack in enumerate(self.stacks):
            places = [self.places[i][1] for i in better if self.places[i][0] == s]
            if places:
                stack.keep_best(places)

    def export(self, lane: int) -> dict[str, Tensor]:
        """A lane's own numbers."""
        s, k = self.places[lane]
        return self.stacks[s].export(k)

    def restore(self, lane: int, saved: dict[str, Tensor]) -> None:
        """What `export` gave."""
        s, k = self.places[lane]
        self.stacks[s].restore(k, saved)


def _sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    """On the device, without waiting for the step that runs there."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
