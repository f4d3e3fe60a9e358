"""Prompt tuning in turn: one prompt, carried from task to task and trained on each (Lester et al., 2021).

Relations: `per-task-prompt` with the prompt carried on instead of begun afresh, and with every task answered
by today's prompt: so later tasks may profit, and earlier ones are forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qtuning.backbones import Backbone
from qtuning.config import MethodSettings, TrainSettings
from qtuning.methods import PROMPT_GRID, MethodInfo, register
from qtuning.methods.qtuning import QState, QTuning, QTuningLane
from qtuning.snapshots import Snapshot
from qtuning.tasks import Split, Task


@dataclass(frozen=True)
class CarriedState(QState):
    """One prompt, which is all that is left of earlier tasks (an encoder keeps their heads)."""

    def answers(self, backbone: Backbone, name: str) -> tuple[Backbone, Snapshot]:
        """Any task, with today's prompt."""
        return backbone, replace(self.snapshots[name], rows=self.current_layout())


class CarriedPrompt(QTuning):
    """The method, bound to a backbone and its settings."""

    state_class = CarriedState

    def __init__(self, backbone: Backbone, settings: MethodSettings, train: TrainSettings):
        alone = replace(settings, queue_size=1, eviction="fifo", shared_length=0, scale=False)
        super().__init__(backbone, alone, train)

    def lane(self, state: QState, task: Task, split: Split) -> QTuningLane:
        """This task as a lane that begins where the last one ended."""
        lane = super().lane(state, task, split)
        if state.learnt:
            lane.trained["prompt"].copy_(state.queue.rows)
        return lane


register(
    MethodInfo(
        name="prompt-tuning",
        description="one prompt, carried from task to task; every task is answered by today's",
        paper="Lester et al., 2021, arXiv 2104.08691",
        make=CarriedPrompt,
        forgets=True,
        grid=PROMPT_GRID,
    )
)
