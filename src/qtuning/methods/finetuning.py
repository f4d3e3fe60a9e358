"""Fine-tuning the model's own weights: a model for every task, or one model that moves on (protocol 1.3, 1 and 2).

Relations: `per-task-finetune` cannot forget and costs a whole model per task; `continual-finetune` keeps one
model and nothing that protects what it knew. `replaying.py` and `ewc.py` add such protections to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qtuning.backbones import Backbone, Head
from qtuning.config import MethodSettings, TrainSettings
from qtuning.lanes import Report
from qtuning.methods import WEIGHTS_GRID, MethodInfo, register
from qtuning.seeding import torch_generator
from qtuning.snapshots import Snapshot, TaskCard, added
from qtuning.tasks import Split, Task
from qtuning.tensors import part
from qtuning.weights import (
    Examples,
    Groups,
    Hooks,
    fit_weights,
    make_examples,
    make_head,
    read_weights,
    trainable_copy,
    write_weights,
)


@dataclass(frozen=True)
class WeightState:
    """A model's weights, and what a method remembers beside them. A value: learning returns a new one."""

    seed: int
    worker: Backbone = field(repr=False, compare=False)
    """The copy of the backbone that weights are put into when they are needed."""
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """Of the model as of today; empty before the first task."""
    heads: Mapping[str, Head] = field(default_factory=dict)
    """An encoder's heads as of today, by task."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """A method's own tensors."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """Texts and labels it keeps, by task: {"texts": …, "labels": …, "card": …}."""
    learnt: int = 0
    snapshots: dict[str, Snapshot] = field(default_factory=dict)

    def answers(self, backbone: Backbone, name: str) -> tuple[Backbone, Snapshot]:
        """A task, by today's weights, or by its own where it has some."""
        snapshot = self.snapshots[name]
        write_weights(self.worker, snapshot.weights or self.weights)
        if not snapshot.weights and name in self.heads:
            snapshot = replace(snapshot, head=self.heads[name])
        return self.worker, snapshot


@dataclass(frozen=True)
class Lesson:
    """One task as it is being learnt."""

    task: Task
    split: Split
    train: Examples
    heads: dict[str, Head]
    """Of earlier tasks, ready to be trained."""


class ContinualFineTune:
    """One model, tasks in turn. Subclasses protect what it knew, by hooks and by what they remember."""

    keeps_weights = False
    """Whether every task keeps a model of its own."""
    trains_old_heads = False
    """Whether heads of earlier tasks move with the model."""

    def __init__(self, backbone: Backbone, settings: MethodSettings, train: TrainSettings):
        self.backbone, self.settings, self.train = backbone, settings, train
        self.worker = trainable_copy(backbone)
        self.original = read_weights(self.worker)

    def start(self, seed: int) -> WeightState:
        """The pretrained weights."""
        return WeightState(seed, self.worker)

    def learn(
        self, state: WeightState, task: Task, split: Split, report: Report | None = None
    ) -> WeightState:
        """The state after one more task."""
        fresh = self.keeps_weights or not state.weights
        write_weights(self.worker, self.original if fresh else state.weights)
        lesson = self.lesson(state, task, split)
        train, head = lesson.train, lesson.train.head
        validation = make_examples(self.worker, task, split.validation, head)
        hooks = self.hooks(state, lesson)
        order = torch_generator(state.seed, state.learnt, task.name, "order")
        names = (f"{task.name}, seed {state.seed}", task.name)
        old = lesson.heads.values() if self.trains_old_heads else ()
        moving = [*old, *([head] if head else [])]
        groups = self.groups(moving)
        settings = self.schedule(state, lesson)
        facts = fit_weights(
            train, validation, task.metric, settings, order, hooks, groups, report, names
        )
        return self.after(state, lesson, facts)

    def lesson(self, state: WeightState, task: Task, split: Split) -> Lesson:
        """A task with a new head, beside the heads of earlier ones."""
        generator = torch_generator(state.seed, state.learnt, task.name, "head")
        head = make_head(self.worker, len(task.label_names), generator)
        train = make_examples(self.worker, task, split.train, head)
        heads = {name: trainable(h, self.worker.device) for name, h in state.heads.items()}
        return Lesson(task, split, train, heads)

    def groups(self, heads: Sequence[Head]) -> Groups:
        """What is trained, with learning rates."""
        outer = [tensor for head in heads for tensor in (head.weight, head.bias)]
        return [
            (list(self.worker.model.parameters()), self.train.weights_lr),
            (outer, self.train.head_lr),
        ]

    def schedule(self, state: WeightState, lesson: Lesson) -> TrainSettings:
        """How long it is trained, in epochs of this task."""
        return self.train

    def hooks(self, state: WeightState, lesson: Lesson) -> Hooks:
        """What is done beside the plain loss."""
        return Hooks()

    def after(self, state: WeightState, lesson: Lesson, facts: dict[str, float]) -> WeightState:
        """The new state, from the worker as training left it."""
        task, weights = lesson.task, read_weights(self.worker)
        head = _kept(lesson.train.head) if lesson.train.head else None
        empty = torch.zeros(0, self.backbone.embed_dim)
        recorded = {**facts, "seed": state.seed, "split": lesson.split.sizes, "rows": 0}
        own = weights if self.keeps_weights else {}
        snapshot = Snapshot(TaskCard.of(task), empty, head, recorded, own)
        heads = {name: _kept(h) for name, h in lesson.heads.items()}
        if head:
            heads[task.name] = head
        return replace(
            state,
            weights={} if self.keeps_weights else weights,
            heads=heads,
            learnt=state.learnt + 1,
            snapshots=added(state.snapshots, snapshot),
        )

    def pack(self, state: WeightState) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights, heads, the method's own tensors; memory as JSON."""
        tensors = {f"weights.{name}": t for name, t in state.weights.items()}
        tensors |= {f"extra.{name}": t for name, t in state.extra.items()}
        for name, head in state.heads.items():
            tensors |= {f"head.{name}.weight": head.weight, f"head.{name}.bias": head.bias}
        facts = {"seed": state.seed, "learnt": state.learnt, "memory": dict(state.memory)}
        return tensors, {**facts, "heads": list(state.heads)}

    def unpack(
        self, tensors: dict[str, Tensor], facts: dict[str, Any], snapshots: dict[str, Snapshot]
    ) -> WeightState:
        """The state that `pack` described."""
        heads = {
            n: Head(tensors[f"head.{n}.weight"], tensors[f"head.{n}.bias"]) for n in facts["heads"]
        }
        return replace(
            self.start(facts["seed"]),
            weights=part(tensors, "weights"),
            heads=heads,
            extra=part(tensors, "extra"),
            memory=facts["memory"],
            learnt=facts["learnt"],
            snapshots=snapshots,
        )


class PerTaskFineTune(ContinualFineTune):
    """A model of its own for every task, from the pretrained weights."""

    keeps_weights = True


def trainable(head: Head, device: torch.device) -> Head:
    """A copy that takes gradients."""
    return Head(*(t.clone().to(device).requires_grad_() for t in (head.weight, head.bias)))


def _kept(head: Head) -> Head:
    return Head(*(t.detach().cpu().clone() for t in (head.weight, head.bias)))


register(
    MethodInfo(
        name="per-task-finetune",
        description="the whole model fine-tuned afresh for every task, and kept",
        paper="Devlin et al., 2019, arXiv 1810.04805",
        make=PerTaskFineTune,
        packable=False,
        grid=WEIGHTS_GRID,
    )
)
register(
    MethodInfo(
        name="continual-finetune",
        description="one model fine-tuned on one task after another, without protection",
        paper="Devlin et al., 2019, arXiv 1810.04805",
        make=ContinualFineTune,
        forgets=True,
        packable=False,
        grid=WEIGHTS_GRID,
    )
)
