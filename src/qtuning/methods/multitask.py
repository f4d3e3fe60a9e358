"""Multi-task training: all tasks so far at once, from the pretrained weights (protocol 1.3, MTL).

Every step sums the losses of one batch of each task; shorter tasks begin again until the longest has ended. It keeps
all training texts and trains anew whenever a task is added, so it is a bound and not a continual learner; in a stream
it puts tasks by and trains once, when all of them are there.

Relations: `replay` with everything kept, in every step, and without a past.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qtuning.backbones import Backbone
from qtuning.config import MethodSettings, TrainSettings
from qtuning.lanes import Report
from qtuning.methods import WEIGHTS_GRID, MethodInfo, register
from qtuning.methods.finetuning import Lesson, WeightState
from qtuning.methods.replaying import Together, WithMemory
from qtuning.tasks import Rows, Split, Task
from qtuning.weights import Examples, Hooks


class JointHooks(Hooks):
    """One batch of every other task, added to the loss of every step."""

    def __init__(self, others: Sequence[Examples], batch: int, generator: torch.Generator):
        self.others, self.batch, self.generator = others, batch, generator
        self.pending: list[list[int]] = [[] for _ in others]

    def penalty(self, batch: Sequence[int]) -> Tensor | None:
        """The sum of the other tasks' losses."""
        if not self.others:
            return None
        where = []
        for m, other in enumerate(self.others):
            if not self.pending[m]:
                self.pending[m] = torch.randperm(len(other), generator=self.generator).tolist()
            places, self.pending[m] = self.pending[m][: self.batch], self.pending[m][self.batch :]
            where += [(m, i) for i in places]
        return Together(self.others, where).losses().sum()


class MultiTask(WithMemory):
    """The bound."""

    trains_old_heads = True

    def __init__(self, backbone: Backbone, settings: MethodSettings, train: TrainSettings):
        super().__init__(backbone, replace(settings, replay_share=1.0), train)

    def learn(
        self, state: WeightState, task: Task, split: Split, report: Report | None = None
    ) -> WeightState:
        """All tasks so far, from the beginning; the last epoch is kept, because one task's validation is no judge."""
        unjudged = replace(split, validation=Rows((), ()))
        return super().learn(replace(state, weights={}), task, unjudged, report)

    def put_by(self, state: WeightState, task: Task, split: Split) -> WeightState:
        """The state with one more task that is not trained yet: its texts, and an encoder's head as it begins."""
        return replace(self.after(state, self.lesson(state, task, split), {}), weights={})

    def schedule(self, state: WeightState, lesson: Lesson) -> TrainSettings:
        """As many steps as the longest task takes."""
        own = len(lesson.train)
        longest = max([own, *(len(kept["labels"]) for kept in state.memory.values())])
        steps = self.train.epochs_of(longest) * self.train.steps_per_epoch(longest)
        epochs = math.ceil(steps / self.train.steps_per_epoch(own))
        return replace(self.train, epochs=epochs, most_steps=0)

    def use(self, memories: Sequence[Examples], generator: torch.Generator) -> Hooks:
        """Every earlier task in every step."""
        return JointHooks(memories, self.train.batch_size, generator)


register(
    MethodInfo(
        name="multi-task",
        description="one model trained on all tasks so far at once; a bound, not a continual learner",
        paper="Caruana, 1997, Machine Learning 28",
        make=MultiTask,
        forgets=True,
        stores_data=True,
        packable=False,
        grid=WEIGHTS_GRID,
    )
)
