"""Zero-shot: the frozen model is asked for the label words, and nothing is learnt (control).

Relations: every other method with nothing trained. What it scores is what the label words alone are worth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qtuning.backbones import Backbone
from qtuning.config import MethodSettings, TrainSettings
from qtuning.lanes import Report
from qtuning.methods import MethodInfo, register
from qtuning.snapshots import Snapshot, TaskCard, added
from qtuning.tasks import Split, Task


@dataclass(frozen=True)
class AskedState:
    """The tasks it can be asked about."""

    snapshots: dict[str, Snapshot] = field(default_factory=dict)


class ZeroShot:
    """The method, bound to a backbone."""

    def __init__(self, backbone: Backbone, settings: MethodSettings, train: TrainSettings):
        self.backbone = backbone

    def start(self, seed: int) -> AskedState:
        """Nothing to remember."""
        return AskedState()

    def learn(
        self, state: AskedState, task: Task, split: Split, report: Report | None = None
    ) -> AskedState:
        """The task's label words, and no prompt."""
        rows = torch.zeros(0, self.backbone.embed_dim)
        snapshot = Snapshot(TaskCard.of(task), rows, None, {"split": split.sizes, "rows": 0})
        return AskedState(added(state.snapshots, snapshot))

    def pack(self, state: AskedState) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Nothing beside the snapshots."""
        return {}, {}

    def unpack(
        self, tensors: dict[str, Tensor], facts: dict[str, Any], snapshots: dict[str, Snapshot]
    ) -> AskedState:
        """The state that `pack` described."""
        return AskedState(snapshots)


register(
    MethodInfo(
        name="zero-shot",
        description="the label words without a prompt; nothing is learnt (control)",
        paper="Brown et al., 2020, arXiv 2005.14165",
        make=ZeroShot,
        families=("causal", "seq2seq"),
        packable=False,
    )
)
