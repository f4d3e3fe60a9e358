"""The finished vectors of one task. A snapshot never changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qtuning.backbones import Backbone, Head, Tokens
from qtuning.errors import ConfigError, unknown
from qtuning.scoring import Answerer, AnswererTable
from qtuning.tasks import Task, Text
from qtuning.tensors import part

EVALUATE_WITH = ("snapshot", "shared", "current")
"""A task's own vectors; those with today's shared prefix; today's prefix and queue for all tasks."""


@dataclass(frozen=True)
class TaskCard:
    """What is left of a task when its texts are gone."""

    name: str
    label_names: tuple[str, ...]
    label_words: Mapping[str, str]
    metric: str = "accuracy"
    is_pair: bool = False
    description: str = ""

    @classmethod
    def of(cls, task: Task) -> TaskCard:
        """The card of a task."""
        return cls(
            task.name,
            tuple(task.label_names),
            dict(task.label_words or {}),
            task.metric,
            task.is_pair,
            task.description,
        )


@dataclass(frozen=True)
class TaskKey:
    """Where a task's texts lie among all texts; see `keys`."""

    vector: Tensor
    """[h], of unit length."""
    mean: Tensor
    spread: Tensor
    """[h] each: the space that the vector lies in."""
    threshold: float
    """Similarity below which a text is of an unknown task."""


@dataclass(frozen=True)
class Snapshot:
    """[shared prefix; scale * (queue, prompt)] exactly as trained, with the head or label words."""

    card: TaskCard
    rows: Tensor
    """[s + q + l, d]."""
    head: Head | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Scores, split sizes and cost, for people."""
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """The whole model's, of a method that keeps a model for every task; empty for all others."""
    key: TaskKey | None = None
    """Finds the task of a text that comes without one."""

    def tensors(self) -> dict[str, Tensor]:
        """What is kept on disk."""
        head = {"head.weight": self.head.weight, "head.bias": self.head.bias} if self.head else {}
        weights = {f"weights.{name}": tensor for name, tensor in self.weights.items()}
        return {"rows": self.rows, **head, **weights, **self._key_tensors()}

    def _key_tensors(self) -> dict[str, Tensor]:
        if self.key is None:
            return {}
        named = {"vector": self.key.vector, "mean": self.key.mean, "spread": self.key.spread}
        named["threshold"] = torch.tensor(self.key.threshold, dtype=torch.float64)
        return {f"key.{name}": tensor for name, tensor in named.items()}

    def equals(self, other: Snapshot) -> bool:
        """Whether it is the same in everything that is kept on disk."""
        ours, theirs = self.tensors(), other.tensors()
        return (
            (self.card, dict(self.facts)) == (other.card, dict(other.facts))
            and ours.keys() == theirs.keys()
            and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
        )

    @classmethod
    def from_tensors(
        cls, card: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> Snapshot:
        """What `tensors` gave, with the card as JSON."""
        about = TaskCard(**{**card, "label_names": tuple(card["label_names"])})
        head = part(tensors, "head")
        weights = part(tensors, "weights")
        found = part(tensors, "key")
        key = TaskKey(**{**found, "threshold": float(found["threshold"])}) if found else None  # type: ignore[arg-type]
        return cls(about, tensors["rows"], Head(**head) if head else None, facts, weights, key)

    def answerer(self, backbone: Backbone) -> Answerer:
        """This task, ready for `scoring.score` on that backbone."""
        words = [self.card.label_words[name] for name in self.card.label_names]
        head = self.head and Head(
            self.head.weight.to(backbone.device), self.head.bias.to(backbone.device)
        )
        return Answerer(self.rows.to(backbone.device), backbone.answers(words), head)


def answering(
    backbone: Backbone, state: Any, name: str, texts: Sequence[Text]
) -> Iterator[tuple[Backbone, Snapshot, Sequence[int]]]:
    """Which model and snapshot a state answers which of a task's texts with.

    By default the task's snapshot on the frozen backbone, as it was learnt. A state that has moved on since
    (see `MethodInfo.forgets`) says so by a method `answers`; one that adapts itself to every text, by a
    context `adapted`.
    """
    if hasattr(state, "adapted"):
        for i, text in enumerate(texts):
            with state.adapted(name, text) as (model, snapshot):
                yield model, snapshot, [i]
        return
    model, snapshot = (
        state.answers(backbone, name) if hasattr(state, "answers") else (backbone, state.snapshots[name])
    )  # fmt: skip
    yield model, snapshot, range(len(texts))


def snapshot_for(state: Any, name: str, evaluate_with: str) -> Snapshot:
    """What a task is answered with on the frozen model: its snapshot, or in a diagnostic one with today's vectors."""
    if evaluate_with not in EVALUATE_WITH:
        raise ConfigError(unknown("evaluation mode", evaluate_with, EVALUATE_WITH))
    snapshot: Snapshot = state.snapshots[name]
    if evaluate_with == "snapshot":
        return snapshot
    check_diagnostic(state, evaluate_with)
    if evaluate_with == "current":
        return replace(snapshot, rows=state.current_layout())
    if "imported_from" in snapshot.facts:
        raise ConfigError(
            f"evaluation mode 'shared' needs a task that was learnt here; {name!r} was imported and has no prefix."
        )
    return replace(snapshot, rows=state.with_shared(snapshot.rows))


def check_diagnostic(state: Any, evaluate_with: str) -> None:
    """Refuse to ask a state in a way that means nothing for its method."""
    if evaluate_with == "current" and not hasattr(state, "current_layout"):
        raise ConfigError(
            f"evaluation mode {evaluate_with!r} needs a method with a queue, such as q-tuning."
        )
    if evaluate_with == "shared" and not len(getattr(state, "shared_prefix", ())):
        raise ConfigError(
            "evaluation mode 'shared' needs a method with a shared prefix, such as q-tuning with shared_length > 0."
        )


def answers_from_snapshots(state: Any) -> bool:
    """Whether every task is answered by its snapshot on the frozen backbone, and by nothing else."""
    return not (hasattr(state, "answers") or hasattr(state, "adapted"))


def added(snapshots: dict[str, Snapshot], new: Snapshot) -> dict[str, Snapshot]:
    """The snapshots and one more, newest last; the mapping given stays as it is."""
    extended = snapshots.copy()
    extended[new.card.name] = new
    return extended


def predict_log_probs(backbone: Backbone, snapshot: Snapshot, texts: Sequence[Text]) -> Tensor:
    """Log-probabilities [texts, labels] of one task, on the CPU; the same bytes whenever it is asked."""
    return predict_together(backbone, [(snapshot, texts)])[0]


def predict_together(
    backbone: Backbone, asked: Sequence[tuple[Snapshot, Sequence[Text]]]
) -> list[Tensor]:
    """The same for several tasks in one go: [texts, labels] of each."""
    answerers = [snapshot.answerer(backbone) for snapshot, _ in asked]
    tokens: list[Tokens] = []
    for (snapshot, texts), answerer in zip(asked, answerers, strict=True):
        tokens += backbone.tokenize(texts, len(snapshot.rows), answerer.answers.longest)
    sizes = [len(texts) for _, texts in asked]
    of_text = [i for i, size in enumerate(sizes) for _ in range(size)]
    if not tokens:
        return [torch.zeros(0, len(snapshot.card.label_names)) for snapshot, _ in asked]
    found = AnswererTable(answerers).padded_log_probs(backbone, tokens, of_text).cpu()
    return [
        own[:, : len(snapshot.card.label_names)].clone()
        for own, (snapshot, _) in zip(torch.split(found, sizes), asked, strict=True)
    ]
