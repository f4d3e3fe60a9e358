"""Linear probe: logistic regression on what the frozen encoder reads without any prompt.

Relations: the cheapest thing that could work; what a prompt method must not fall behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qtuning.backbones import Backbone, Head
from qtuning.config import MethodSettings, TrainSettings
from qtuning.evaluation import score_predictions
from qtuning.keys import read_features
from qtuning.lanes import Report
from qtuning.methods import MethodInfo, register
from qtuning.snapshots import Snapshot, TaskCard, added
from qtuning.tasks import Split, Task

PENALTIES = (10.0, 1.0, 0.1, 0.01)
"""Strengths of the L2 penalty tried, chosen on validation; strongest first, so that it wins ties."""


@dataclass(frozen=True)
class ProbeState:
    """The snapshots, and nothing else."""

    snapshots: dict[str, Snapshot] = field(default_factory=dict)


class LinearProbe:
    """The method, bound to a backbone."""

    def __init__(self, backbone: Backbone, settings: MethodSettings, train: TrainSettings):
        self.backbone = backbone

    def start(self, seed: int) -> ProbeState:
        """Nothing learnt yet."""
        return ProbeState()

    def learn(
        self, state: ProbeState, task: Task, split: Split, report: Report | None = None
    ) -> ProbeState:
        """The state after one more task."""
        train = read_features(self.backbone, split.train.texts).double()
        validation = read_features(self.backbone, split.validation.texts).double()
        labels = torch.tensor(split.train.labels)
        classes = len(task.label_names)
        heads = [fit_logistic(train, labels, classes, penalty) for penalty in PENALTIES]
        found = [
            score_predictions(
                task.metric,
                split.validation.labels,
                F.linear(validation, head.weight, head.bias).argmax(dim=-1).tolist(),
            )
            for head in heads
        ]
        head = (
            heads[max(range(len(found)), key=lambda i: (found[i], -i))]
            if split.validation
            else heads[1]
        )
        dtype = self.backbone.lane_dtype
        head = Head(head.weight.to(dtype), head.bias.to(dtype))
        empty = torch.zeros(0, self.backbone.embed_dim)
        snapshot = Snapshot(TaskCard.of(task), empty, head, {"split": split.sizes, "rows": 0})
        return ProbeState(added(state.snapshots, snapshot))

    def pack(self, state: ProbeState) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Nothing beside the snapshots."""
        return {}, {}

    def unpack(
        self, tensors: dict[str, Tensor], facts: dict[str, Any], snapshots: dict[str, Snapshot]
    ) -> ProbeState:
        """The state that `pack` described."""
        return ProbeState(snapshots)


def fit_logistic(features: Tensor, labels: Tensor, classes: int, penalty: float) -> Head:
    """Minimise sum of cross-entropies + penalty / 2 * ||weight||^2 with L-BFGS, in float64.

    features [n, h], labels [n] -> a head; the optimum is unique and equals scikit-learn's at C = 1 / penalty.
    """
    weight = torch.zeros(classes, features.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [weight, bias], max_iter=500, tolerance_grad=1e-8, tolerance_change=1e-12,
        history_size=20, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(F.linear(features, weight, bias), labels, reduction="sum")
        loss = loss + penalty / 2 * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return Head(weight.detach(), bias.detach())


register(
    MethodInfo(
        name="linear-probe",
        description="logistic regression on frozen features, no prompt (control)",
        paper="Alain and Bengio, 2016, arXiv 1610.01644",
        make=LinearProbe,
        families=("encoder",),
        packable=False,
    )
)
