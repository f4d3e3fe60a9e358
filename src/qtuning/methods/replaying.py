"""Fine-tuning with a memory of earlier texts: data replay and A-GEM (protocol 1.3, 4 and 6).

Relations: both keep a share of every task's training examples. `replay` trains on them every few steps;
`a-gem` (Chaudhry et al., 2019) only asks that a step does not hurt them: if the gradient g opposes the
memory's gradient r, it becomes g - (g . r / r . r) r, Eq. 11 of that paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtuning.backbones import Backbone, Head
from qtuning.methods import REPLAY_GRID, WEIGHTS_GRID, MethodInfo, register
from qtuning.methods.finetuning import ContinualFineTune, Lesson, WeightState
from qtuning.objectives import cross_entropy
from qtuning.passes import cut
from qtuning.seeding import numpy_generator, torch_generator
from qtuning.snapshots import TaskCard
from qtuning.tasks import Rows, Task, Text
from qtuning.weights import Examples, Hooks, make_examples


def choose_memory(rows: Rows, classes: int, share: float, generator: Any) -> list[int]:
    """Places of a share of the rows, equally many of each class, one at least; 1 means all."""
    if share >= 1:
        return list(range(len(rows)))
    each = max(1, math.floor(share * len(rows) / classes))
    order = generator.permutation(len(rows)).tolist()
    return sorted(
        i for label in range(classes) for i in [i for i in order if rows.labels[i] == label][:each]
    )


class WithMemory(ContinualFineTune):
    """Fine-tuning that keeps some texts of every task.

    Old heads do not move, only what they read does: a head trained on a handful of kept texts overfits them.
    """

    def hooks(self, state: WeightState, lesson: Lesson) -> Hooks:
        """What is kept, as examples for the worker, and what the method does with them."""
        memories = [
            recall(self.worker, kept, lesson.heads.get(name)) for name, kept in state.memory.items()
        ]
        return self.use(memories, torch_generator(state.seed, state.learnt, "memory"))

    def use(self, memories: Sequence[Examples], generator: torch.Generator) -> Hooks:
        """What the method does with its memory, drawing from it by the generator."""
        raise NotImplementedError

    def after(self, state: WeightState, lesson: Lesson, facts: dict[str, float]) -> WeightState:
        """Some of this task's texts are kept too."""
        new = super().after(state, lesson, facts)
        kept = lesson.split.train.at(self.choose(state, lesson))
        return replace(new, memory={**state.memory, lesson.task.name: remember(lesson.task, kept)})

    def choose(self, state: WeightState, lesson: Lesson) -> list[int]:
        """Which of the training examples are kept."""
        generator = numpy_generator(state.seed, state.learnt, lesson.task.name, "memory")
        classes = len(lesson.task.label_names)
        return choose_memory(lesson.split.train, classes, self.settings.replay_share, generator)


def remember(task: Task, rows: Rows) -> dict[str, Any]:
    """Rows of a task as JSON."""
    return {
        "texts": [list(t) if isinstance(t, tuple) else t for t in rows.texts],
        "labels": list(rows.labels),
        "card": {**asdict(TaskCard.of(task)), "label_names": list(task.label_names)},
    }


def recall(worker: Backbone, kept: dict[str, Any], head: Head | None) -> Examples:
    """What `remember` gave, as examples for a backbone."""
    card = TaskCard(**{**kept["card"], "label_names": tuple(kept["card"]["label_names"])})
    return make_examples(worker, card, Rows(kept_texts(kept), kept["labels"]), head)


def kept_texts(kept: dict[str, Any]) -> tuple[Text, ...]:
    """The texts of what `remember` gave; JSON has lists for pairs."""
    return tuple(tuple(t) if isinstance(t, list) else t for t in kept["texts"])


class Together:
    """Examples of several tasks, read in the same passes; each is given by its memory and its place there."""

    def __init__(self, memories: Sequence[Examples], where: Sequence[tuple[int, int]]):
        self.parts = [
            (memories[m], [i for n, i in where if n == m])
            for m in dict.fromkeys(m for m, _ in where)
        ]
        self.backbone = memories[0].backbone
        device = self.backbone.device
        rows = [memory.rows[i] for memory, places in self.parts for i in places]
        self.reading = self.backbone.prepare(rows)
        lengths = np.array([memory.lengths[i] for memory, places in self.parts for i in places])
        order = np.argsort(-lengths, kind="stable")
        passes = cut(lengths[order], device)
        read = torch.from_numpy(order).to(device)
        widths = [width for _, width in passes]
        self.passes = list(zip(torch.split(read, [n for n, _ in passes]), widths, strict=True))
        self.place = read.argsort()
        self.targets = [memory.targets[places] for memory, places in self.parts]
        shares = [len(places) / len(rows) for _, places in self.parts]
        self.shares = torch.tensor(shares, dtype=self.backbone.lane_dtype, device=device)

    def losses(self) -> Tensor:
        """Mean cross-entropy of each task's own [tasks], every task with its own head."""
        bank = self.parts[0][0].bank()
        read = [
            self.backbone.hidden(self.reading.at(own, width), bank) for own, width in self.passes
        ]
        hidden = torch.cat(read).index_select(0, self.place)
        each = torch.split(hidden, [len(places) for _, places in self.parts])
        return torch.stack(
            [
                cross_entropy(
                    self.backbone.logits(own[:, : t.shape[1]], memory.head), t[:, : own.shape[1]]
                )
                for (memory, _), own, t in zip(self.parts, each, self.targets, strict=True)
            ]
        )

    def mean_loss(self) -> Tensor:
        """Of all examples alike."""
        return (self.losses() * self.shares).sum()


class ReplayHooks(Hooks):
    """Every few steps one batch of every earlier task, each with a step of its own."""

    def __init__(
        self, memories: Sequence[Examples], every: int, batch: int, generator: torch.Generator
    ):
        self.memories, self.every, self.batch, self.generator = memories, every, batch, generator
        self.replayed = 0

    def after_step(self, step: int, optimiser: torch.optim.Optimizer) -> None:
        """Replay, when it is time."""
        if step % self.every:
            return
        for memory in self.memories:
            places = torch.randperm(len(memory), generator=self.generator)[: self.batch].tolist()
            optimiser.zero_grad()
            memory.loss(places).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            self.replayed += 1


class Replay(WithMemory):
    """Data replay."""

    def use(self, memories: Sequence[Examples], generator: torch.Generator) -> Hooks:
        """Replay of what is kept."""
        return ReplayHooks(memories, self.settings.replay_every, self.train.batch_size, generator)


def project(gradient: list[Tensor], reference: list[Tensor]) -> Sequence[Tensor]:
    """The gradient, without what opposes the reference (A-GEM, Eq. 11)."""
    pairs = zip(gradient, reference, strict=True)
    dot = torch.stack([torch.dot(g.flatten(), r.flatten()) for g, r in pairs]).sum()
    length = torch.stack([torch.dot(r.flatten(), r.flatten()) for r in reference]).sum()
    share = torch.where(dot < 0, dot / length, 0.0)  # without asking the device which it is
    return torch._foreach_sub(gradient, torch._foreach_mul(reference, share))


class AGemHooks(Hooks):
    """Project every gradient against that of a batch from memory."""

    def __init__(self, memories: Sequence[Examples], batch: int, generator: torch.Generator):
        self.memories, self.batch, self.generator = memories, batch, generator

    def edit_gradients(self, parameters: Sequence[Tensor]) -> None:
        """G becomes its projection."""
        if not self.memories:
            return
        given = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        where, share = [], max(1, self.batch // len(self.memories))
        for m, memory in enumerate(self.memories):
            places = torch.randperm(len(memory), generator=self.generator)[:share].tolist()
            where += [(m, i) for i in places]
        loss = Together(self.memories, where).losses().mean()
        reference = torch.autograd.grad(
            loss, list(parameters), allow_unused=True, materialize_grads=True
        )
        for parameter, gradient in zip(parameters, project(given, list(reference)), strict=True):
            parameter.grad = gradient


class AGem(WithMemory):
    """Averaged gradient episodic memory."""

    def use(self, memories: Sequence[Examples], generator: torch.Generator) -> Hooks:
        """Projection against what is kept."""
        return AGemHooks(memories, self.train.batch_size, generator)


register(
    MethodInfo(
        name="replay",
        description="fine-tuning with a share of earlier texts, trained on again every few steps",
        paper="de Masson d'Autume et al., 2019, arXiv 1906.01076 (sparse replay)",
        make=Replay,
        forgets=True,
        stores_data=True,
        packable=False,
        grid=REPLAY_GRID,
    )
)
register(
    MethodInfo(
        name="a-gem",
        description="fine-tuning whose gradients are kept from opposing those of earlier texts",
        paper="Chaudhry et al., 2019, arXiv 1812.00420",
        make=AGem,
        forgets=True,
        stores_data=True,
        packable=False,
        grid=WEIGHTS_GRID,
    )
)
