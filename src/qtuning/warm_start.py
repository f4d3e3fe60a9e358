"""Where a new prompt starts: from the earlier task that helps most, instead of from the vocabulary.

A departure from the paper (`warm_start`). `loss` asks which finished prompt, as it stands, explains the new task's
training examples best; `answers` which chooses best among the new task's labels, and takes it only if that is better
than guessing; `key` which task's texts lie nearest. All ask the latest few tasks, so that the cost of a task does not
grow with the stream. `latest` and `first` ask nobody: a prompt that is carried on from task to task, and the control in
which every task starts from the same one, related or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtuning.backbones import AnswerSet, Backbone
from qtuning.backbones.prefixes import PromptMemory
from qtuning.config import MethodSettings
from qtuning.errors import ConfigError
from qtuning.keys import directions, read_features
from qtuning.scoring import Answerer, AnswererTable, read_in_lines
from qtuning.snapshots import Snapshot
from qtuning.tasks import Rows, Split

CANDIDATES = 10
"""Tasks that are asked, at most: the latest."""
UNASKED = {"latest": -1, "first": 1}
"""Starts that nothing decides but the place in the stream: the first own task from its end, or from its beginning."""
JUDGED_ROWS = 64
"""Training examples that are looked at, at most."""


def check_warm_start(backbone: Backbone, settings: MethodSettings) -> None:
    """Refuse what could only fail at the second task."""
    if settings.warm_start in ("loss", "answers") and backbone.needs_head:
        raise ConfigError(
            f"warm_start {settings.warm_start!r} needs a model that writes its answers, and {backbone.name!r} has "
            f"no head for a task before it is learnt; use warm_start 'key'."
        )


@dataclass(frozen=True)
class Start:
    """Where a new prompt starts, and why."""

    source: Snapshot | None = None
    """The earlier task; None for the vocabulary."""
    cost: float | None = None
    """Of the best earlier task, taken or not: a loss, or less its similarity; None where nobody was asked."""


def find_start(
    backbone: Backbone,
    settings: MethodSettings,
    snapshots: Mapping[str, Snapshot],
    split: Split,
    answers: AnswerSet,
) -> Start:
    """Ask the latest tasks which of them the new prompt should start from."""
    if settings.warm_start == "none":
        return Start()
    names = list(snapshots)
    if settings.warm_start in UNASKED:
        in_order = (snapshots[name] for name in names[:: UNASKED[settings.warm_start]])
        return Start(next(filter(_is_own, in_order), None))
    known = [each for name in names[-CANDIDATES:] if _is_own(each := snapshots[name])]
    if not known:
        return Start()
    train = split.train.at(range(0, len(split.train), -(-len(split.train) // JUDGED_ROWS)))
    if settings.warm_start == "key":
        features = read_features(backbone, train.texts)
        costs = [-similarity(features, each) for each in known]
    else:
        losses = answer_losses if settings.warm_start == "answers" else word_losses
        costs = losses(backbone, known, train, answers)
    cost, best = min(zip(costs, range(len(known)), strict=True))
    if settings.warm_start == "answers" and cost >= math.log(len(answers.sequences)):
        return Start(None, cost)  # guessing is as good
    return Start(known[best], cost)


def similarity(features: Tensor, snapshot: Snapshot) -> float:
    """Mean cosine of features [n, h] to a task's key; the least there is without one."""
    key = snapshot.key
    if key is None:
        return -1.0
    return float((directions(features, key.mean, key.spread) @ key.vector).mean())


def word_losses(
    backbone: Backbone, snapshots: Sequence[Snapshot], train: Rows, answers: AnswerSet
) -> list[float]:
    """Of each finished prompt, the training loss (Eq. 8): over the tokens of the right label, among all words."""
    tokens = sum(len(answers.sequences[label]) for label in train.labels)
    right = _of_right_label(backbone, snapshots, train, answers, among_labels=False)
    return (-right.sum(dim=1) / tokens).tolist()


def _is_own(snapshot: Snapshot) -> bool:
    """Whether its task was learnt here."""
    return "imported_from" not in snapshot.facts


def answer_losses(
    backbone: Backbone, snapshots: Sequence[Snapshot], train: Rows, answers: AnswerSet
) -> list[float]:
    """Of each finished prompt, the mean loss of the right label among the labels; guessing has log(labels)."""
    right = _of_right_label(backbone, snapshots, train, answers, among_labels=True)
    return (-right.mean(dim=1)).tolist()


def _of_right_label(
    backbone: Backbone,
    snapshots: Sequence[Snapshot],
    train: Rows,
    answers: AnswerSet,
    among_labels: bool,
) -> Tensor:
    """Log-probabilities [snapshots, n] of the right labels under each finished prompt, all read in one go."""
    table = AnswererTable([Answerer(s.rows.to(backbone.device), answers) for s in snapshots])
    tokens = [
        t for s in snapshots for t in backbone.tokenize(train.texts, len(s.rows), answers.longest)
    ]
    if backbone.remembers_prompts and not read_in_lines(
        backbone, [len(answers.paths)] * len(tokens)
    ):
        table.remember_prompts(PromptMemory(backbone.read_prompt))
    asked = [number for number in range(len(snapshots)) for _ in train.texts]
    found = table.padded_log_probs(backbone, tokens, asked, among_labels).cpu().double()
    gold = torch.tensor(train.labels).repeat(len(snapshots))
    return found.gather(1, gold[:, None]).view(len(snapshots), len(train))
