"""Where one lane stands in its training: its batches, its best state, what continuing needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qtuning.config import TrainSettings
from qtuning.stack import Lane

FitState = tuple[dict[str, Tensor], dict[str, Any]]
"""Where one lane stands: tensors, and JSON for the rest."""

RESUMED = ("epoch", "step", "pending", "losses", "best", "best_epoch", "latest", "stale", "has_begun",
           "is_done", "at_once")  # fmt: skip
"""The plain values of a lane's training."""


@dataclass
class Fit:
    """Where one lane stands in its training."""

    lane: Lane
    settings: TrainSettings
    at_once: int = 0
    """Lanes that train at the same time, as decided when the pack began."""
    epoch: int = 0
    step: int = 0
    pending: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    best: tuple[float, float] | None = None
    """Score and log-likelihood on the validation rows."""
    best_epoch: int = 0
    latest: float | None = None
    stale: int = 0
    has_begun: bool = False
    is_done: bool = False
    saved: dict[str, Tensor] | None = None
    """Its numbers while it is in no pack."""

    def next_batch(self) -> list[int]:
        """Training examples of the next step."""
        if not self.pending:
            count = len(self.lane.train)
            self.pending = torch.randperm(count, generator=self.lane.order).tolist()
        size = self.settings.batch_size
        batch, self.pending = self.pending[:size], self.pending[size:]
        self.step += 1
        return batch

    def batches_ahead(self) -> Iterator[list[int]]:
        """Training examples of every step until its last epoch ends; none of them is taken."""
        copy, size, ahead = torch.Generator(), self.settings.batch_size, self.pending
        copy.set_state(self.lane.order.get_state())
        for _ in range(self.epochs - self.epoch):
            ahead = ahead or torch.randperm(len(self.lane.train), generator=copy).tolist()
            yield from (ahead[i : i + size] for i in range(0, len(ahead), size))
            ahead = []

    @property
    def steps_ahead(self) -> int:
        """Steps until its last epoch ends."""
        size = self.settings.batch_size
        per_epoch = -(-len(self.lane.train) // size)
        return (self.epochs - self.epoch) * per_epoch

    @property
    def epochs(self) -> int:
        """How many there will be."""
        return self.settings.epochs_of(len(self.lane.train))

    def judge(self, quality: tuple[float, float]) -> bool:
        """Whether this validation is the best so far.

        Equal scores are common with a few dozen rows: the likelihood of the right labels decides.
        """
        self.latest = quality[0]
        if self.best is None or quality > self.best:
            self.best, self.best_epoch, self.stale = quality, self.epoch, 0
            return True
        self.stale += 1
        return False

    def export(self) -> FitState:
        """Everything that continuing needs."""
        tensors = {**(self.saved or {}), "order": self.lane.order.get_state()}
        return tensors, {name: getattr(self, name) for name in RESUMED}

    def restore(self, saved: FitState) -> None:
        """Stand where an exported lane stood."""
        tensors, facts = saved
        for name in RESUMED:
            setattr(self, name, facts[name])
        self.best = tuple(facts["best"]) if facts["best"] else None
        self.saved = {k: t for k, t in tensors.items() if k != "order"} or None
        self.lane.order.set_state(tensors["order"].cpu())
