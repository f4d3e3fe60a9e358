"""Q-tuning-plus: Q-tuning with departures from the paper, each of them a switch of its own.

The queue is full from the beginning (`fill_queue`), and a task trains a copy of the queue's rows (`thaw`) instead of
only reweighing them.

Relations: `q-tuning` with `--set fill_queue=true --set thaw=true` is the same; leave one out to see what it is worth,
or add a third, `--set warm_start=loss`, which starts the new prompt from the earlier task that explains it best. Every
task trains as many rows as `per-task-prompt-long` has, from the first task on; what differs from that is where the rows
start, a scale on them, and retention of the shared prefix.
"""

from __future__ import annotations

from dataclasses import replace

from qtuning.backbones import Backbone
from qtuning.config import MethodSettings, TrainSettings
from qtuning.methods import MethodInfo, register
from qtuning.methods.qtuning import QTuning


def q_tuning_plus(backbone: Backbone, settings: MethodSettings, train: TrainSettings) -> QTuning:
    """Both departures."""
    return QTuning(backbone, replace(settings, fill_queue=True, thaw=True), train)


register(
    MethodInfo(
        name="q-tuning-plus",
        description="Q-tuning with a thawed queue that is full from the start",
        paper="Guo et al., 2024, arXiv 2404.14607",
        make=q_tuning_plus,
        grid={"prompt_lr+shared_lr+queue_lr": (0.3, 1.0, 3.0), "epochs": (1.0, 2.0)},
    )
)
