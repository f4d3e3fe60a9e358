"""Lanes of like structure as stacked tensors: one operation moves all of them.

Every tensor has a leading dimension of lanes; where lanes differ in size (queue rows, classes), the
smaller ones are padded with zeros that nothing reads. A lane's loss touches only its own slice, so
gradients cannot mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from qtuning.backbones import AnswerSet, Backbone, Head, Row, Tokens
from qtuning.config import MethodSettings, TrainSettings
from qtuning.objectives import (
    IGNORE,
    cross_entropy,
    discriminate,
    jsd_retention,
    kl_retention,
    label_scores,
)
from qtuning.tensors import part

GROUPS = {
    "prompt": "prompt_lr",
    "u": "scale_lr",
    "v": "scale_lr",
    "shared": "shared_lr",
    "queue_rows": "queue_lr",
    "mlp": "mlp_lr",
    "shared_mlp": "mlp_lr",
    "head": "head_lr",
    "discriminator": "discriminator_lr",
}
"""Learning rate of a trained tensor, by the first word of its name."""
UNCLIPPED = "discriminator"
"""Trained beside the lane, outside its gradient clipping."""
BETAS, EPSILON = (0.9, 0.999), 1e-8
NO_CLASS = -1e9
"""Logit of a class that a lane does not have: finite, so that its divergence is 0 and not undefined."""


class Lane(Protocol):
    """All that the engine knows of a method: one run learning one task."""

    name: str
    task: str
    metric: str
    order: torch.Generator
    trained: dict[str, Tensor]
    fixed: dict[str, Tensor]
    answers: AnswerSet
    settings: MethodSettings
    train: Sequence[Tokens]
    train_labels: Sequence[int]
    validation: Sequence[Tokens]
    validation_labels: Sequence[int]
    teacher: Tensor | None
    """[examples, t, h] read-outs that retention compares with; None where there is no retention."""

    @property
    def structure(self) -> tuple[Any, ...]:
        """Lanes that agree in this can be stacked."""
        ...

    def layout(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What stands before the text, from trained and fixed tensors, stacked or not: [..., rows, d]."""
        ...

    def slots(self, longest_queue: int) -> list[int]:
        """The lane's own rows in a layout whose queue is padded."""
        ...


def kind_of_step(settings: TrainSettings) -> tuple[float, ...]:
    """What lanes of one stack have in common: they may differ in everything else about their training."""
    return settings.clip, settings.weight_decay, settings.average


def pad_stack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one rank as one, [lanes, ...], zeros where a tensor is smaller."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    out = tensors[0].new_zeros(len(tensors), *shape)
    for line, tensor in zip(out, tensors, strict=True):
        line[tuple(slice(size) for size in tensor.shape)] = tensor
    return out


@dataclass(frozen=True)
class Batches:
    """One step's examples of a stack, padded to the same number for every lane."""

    example: Tensor
    """[lanes, b] rows of the stack's table of training examples."""
    is_live: Tensor
    """[lanes, b] False where a row only fills the batch; live rows come first."""
    count: Tensor
    """[lanes] optimiser steps, this one included; 0 where the lane stands still."""


@dataclass(frozen=True)
class Step:
    """One step of a pack: each stack's examples, and the rows to be read for them, in the order of reading."""

    batches: list[Batches]
    rows: Tensor
    """[n] rows of the pack's table, those that retention reads again included."""
    place: Tensor
    """[n] where each row, in the order of the batches, stands among them."""

    def tensors(self) -> list[Tensor]:
        """All of them, in a fixed order."""
        own = [tensor for b in self.batches for tensor in (b.example, b.is_live, b.count)]
        return [*own, self.rows, self.place]

    def clone(self) -> Step:
        """The same in memory of its own."""
        batches = [
            Batches(b.example.clone(), b.is_live.clone(), b.count.clone()) for b in self.batches
        ]
        return Step(batches, self.rows.clone(), self.place.clone())


class LaneStack:
    """Lanes of one structure: their tensors, their loss, their optimiser."""

    def __init__(
        self, backbone: Backbone, lanes: Sequence[Lane], settings: Sequence[TrainSettings]
    ):
        """`settings` are those of each lane: learning rates may differ, `kind_of_step` may not."""
        self.backbone, self.lanes, self.settings = backbone, list(lanes), settings[0]
        first = self.lanes[0]
        self.rates = {
            name: torch.tensor(
                [getattr(own, name) for own in settings], dtype=torch.double, device=backbone.device
            )
            for name in set(GROUPS.values())
        }
        """[lanes] learning rates."""
        self.trained = {
            name: pad_stack([lane.trained[name] for lane in lanes]).requires_grad_()
            for name in sorted(
                first.trained
            )  # sums over them must not depend on how they were loaded
        }
        self.fixed = {name: pad_stack([lane.fixed[name] for lane in lanes]) for name in first.fixed}
        self.first = {name: torch.zeros_like(t) for name, t in self.trained.items()}
        self.second = {name: torch.zeros_like(t) for name, t in self.trained.items()}
        self.averaged = self.trained
        """What is validated and kept: the running average of what is trained, or simply that."""
        if self.settings.average:
            self.averaged = {name: t.detach().clone() for name, t in self.trained.items()}
        self.best = {name: t.detach().clone() for name, t in self.trained.items()}
        self.queue = {**self.fixed, **self.trained}["queue_rows"].shape[1]
        self.rows = self.bank().shape[0] // len(lanes)
        classes = [len(lane.answers.sequences) for lane in lanes]
        self.classes = torch.tensor(classes, device=backbone.device)
        self._make_table()

    def _make_table(self) -> None:
        """Training examples of all lanes, one under another, with targets and teachers."""
        steps = max(lane.answers.longest for lane in self.lanes)
        targets: list[list[int]] = []
        self.starts: list[int] = []
        for lane in self.lanes:
            self.starts.append(len(targets))
            answers = [lane.answers.sequences[label] for label in lane.train_labels]
            targets += [[*answer, *[IGNORE] * (steps - len(answer))] for answer in answers]
        self.targets = torch.tensor(targets, device=self.backbone.device)
        self.teacher: Tensor | None = None
        if self.lanes[0].teacher is not None:
            teachers = [lane.teacher for lane in self.lanes if lane.teacher is not None]
            padded = [F.pad(t, (0, 0, 0, steps - t.shape[1])) for t in teachers]
            self.teacher = torch.cat(padded)

    def slots(self, lane: int) -> list[int]:
        """Rows of `bank` that make up one lane's layout."""
        return [lane * self.rows + slot for slot in self.lanes[lane].slots(self.queue)]

    def table_rows(self, offset: int) -> list[Row]:
        """The table as rows to read, then once more under the shared prefix where there is retention."""
        rows: list[Row] = []
        for only_shared in [False, True][: 1 if self.teacher is None else 2]:
            for i, lane in enumerate(self.lanes):
                slots = [offset + slot for slot in self.slots(i)]
                if only_shared:
                    slots = slots[: lane.settings.shared_length]
                answers = [lane.answers.sequences[label][:-1] for label in lane.train_labels]
                rows += [Row(t, slots, (a,)) for t, a in zip(lane.train, answers, strict=True)]
        return rows

    def bank(self, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """Layouts of all lanes one under another, [lanes * rows, d]; of what is trained, or of its average."""
        return self.lanes[0].layout({**self.fixed, **(tensors or self.trained)}).flatten(0, 1)

    def heads(self, tensors: Mapping[str, Tensor] | None = None) -> Head | None:
        """Classification heads, [lanes, classes, h]."""
        found = part(tensors or self.trained, "head")
        return Head(**found) if found else None

    # ── one step ─────────────────────────────────────────────────────────────────────────────

    def losses(self, hidden: Tensor, again: Tensor | None, batches: Batches) -> Tensor:
        """[lanes]: L_Q (Eq. 8) and, weighed by the memory factor, L_MR (Eq. 10).

        Args:
            hidden: [lanes * b, t, h] read-outs of the batches' rows.
            again: The same rows under the shared prefix alone, where there is retention.
            batches: Which examples they are.
        """
        targets = self.targets[batches.example].where(batches.is_live[..., None], IGNORE)
        shape = (*targets.shape, hidden.shape[-1])  # [lanes, b, t, h]
        heads = self.heads()
        loss = cross_entropy(self._logits(hidden[:, : shape[2]].reshape(shape), heads), targets)
        if self.teacher is None or again is None:
            return loss
        # the head is the current one on both sides, without gradient (A11): retention moves only the
        # shared prefix, its MLP, and for jsd the discriminator
        frozen = heads.detached() if heads else None
        new = self._logits(again[:, : shape[2]].reshape(shape), frozen)
        old = self._logits(self.teacher[batches.example], frozen)
        return loss + self.lanes[0].settings.memory_factor * self._retention(
            new, old, targets, batches.is_live
        )

    def _logits(self, states: Tensor, heads: Head | None) -> Tensor:
        """[lanes, b, t, h] -> [lanes, b, t, v]; classes that a lane does not have are out of the question."""
        logits = self.backbone.logits(states, heads)
        if heads is None:
            return logits
        columns = torch.arange(logits.shape[-1], device=logits.device)
        return logits.where(columns < self.classes[:, None, None, None], NO_CLASS)

    def _retention(self, new: Tensor, old: Tensor, targets: Tensor, is_live: Tensor) -> Tensor:
        """L_MR [lanes]: the shared prefix alone should answer as the previous state did (Eq. 9 or 18)."""
        weights = part(self.trained, "discriminator")
        if not weights:
            return kl_retention(new, old, targets)
        columns, is_column = self.fixed["columns"], self.fixed["is_column"]
        scores = [label_scores(each, targets, columns, is_column) for each in (new, old)]
        return jsd_retention(
            scores[0], scores[1], lambda a, b: discriminate(weights, a, b), is_live.sum(dim=-1)
        )

    @torch.no_grad()
    def moved(self, gradients: Mapping[str, Tensor], count: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Clip each lane's gradient by its norm, then one step of Adam for every lane: tensors and their new values.

        Nothing is changed yet, so that a step that fails leaves everything as it was. The formula is that of
        `torch.optim.Adam`, with a step count of its own for each lane (`count` [lanes]), because lanes may
        have begun at different times; a lane with count 0 stands still.
        """
        clip = self.settings.clip
        clipped = [g for name, g in gradients.items() if not name.startswith(UNCLIPPED)]
        norm = torch.stack([g.flatten(1).square().sum(dim=1) for g in clipped]).sum(dim=0).sqrt()
        factor = (clip / (norm + 1e-6)).clamp(max=1.0) if clip > 0 else torch.ones_like(norm)
        is_moving, count = count > 0, count.clamp(min=1).double()
        changes: list[tuple[Tensor, Tensor]] = []
        for name, gradient in gradients.items():
            parameter, first, second = self.trained[name], self.first[name], self.second[name]
            lanes = (-1, *[1] * (parameter.dim() - 1))
            if not name.startswith(UNCLIPPED):
                gradient = gradient * factor.view(lanes)
            if self.settings.weight_decay:
                gradient = gradient + self.settings.weight_decay * parameter
            new_first = first.lerp(gradient, 1 - BETAS[0])
            new_second = (second * BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            rate = self.rates[GROUPS[name.split(".")[0]]]
            size = (rate / (1 - BETAS[0] ** count)).to(parameter).view(lanes)
            root = new_second.sqrt() / (1 - BETAS[1] ** count).sqrt().to(parameter).view(lanes)
            new = parameter - size * new_first / (root + EPSILON)
            moving = is_moving.view(lanes)
            for old, value in ((parameter, new), (first, new_first), (second, new_second)):
                changes.append((old, torch.where(moving, value, old)))
            if self.settings.average:
                # a plain mean at first, so that the start is soon forgotten
                share = (1 / count).clamp(min=1 - self.settings.average).to(parameter).view(lanes)
                mean = self.averaged[name]
                changes.append((mean, torch.where(moving, mean.lerp(new, share), mean)))
        return changes

    # ── one lane of it ───────────────────────────────────────────────────────────────────────

    def keep_best(self, better: Sequence[int]) -> None:
        """Remember the present state of these lanes as their best."""
        index = torch.tensor(list(better), device=self.backbone.device)
        for name, tensor in self.best.items():
            tensor[index] = self.averaged[name].detach()[index]

    def _kinds(self) -> dict[str, dict[str, Tensor]]:
        kinds = {
            "parameter": self.trained,
            "best": self.best,
            "first": self.first,
            "second": self.second,
        }
        return kinds | ({"average": self.averaged} if self.settings.average else {})

    def export(self, lane: int) -> dict[str, Tensor]:
        """A lane's own numbers, without padding, by kind and name."""
        return {
            f"{kind}.{name}": tensors[name]
            .detach()[lane][tuple(slice(n) for n in own.shape)]
            .clone()
            for kind, tensors in self._kinds().items()
            for name, own in self.lanes[lane].trained.items()
        }

    @torch.no_grad()
    def restore(self, lane: int, saved: Mapping[str, Tensor]) -> None:
        """What `export` gave."""
        for kind, tensors in self._kinds().items():
            for name, own in self.lanes[lane].trained.items():
                place = tensors[name][lane][tuple(slice(n) for n in own.shape)]
                place.copy_(saved[f"{kind}.{name}"])
