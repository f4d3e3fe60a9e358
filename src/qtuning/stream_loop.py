"""The loop: for each task of a stream, learn it, score what was learnt so far, keep the row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtuning.backbones import Backbone
from qtuning.config import TrainSettings
from qtuning.errors import ConfigError, unknown
from qtuning.evaluation import Matrix, score_predictions
from qtuning.lanes import Report
from qtuning.methods import Method
from qtuning.seeding import numpy_generator
from qtuning.snapshots import Snapshot, TaskCard, predict_log_probs
from qtuning.tasks import Rows, Split, Task

INNER_CELL_ROWS = 64
"""Test rows per task for cells that neither the diagonal nor the last row needs."""
EVALUATE_WITH = ("snapshot", "current")


@dataclass(frozen=True)
class StreamResult:
    """What one run of a stream leaves: the last state and the measured score matrix."""

    tasks: tuple[str, ...]
    state: Any
    matrix: Matrix
    """R[i, j] of shape [tasks + 1, tasks]; nan where nothing was measured."""
    unchanged: dict[str, bool]
    """For each task whether its scores at the end are, byte for byte, those when it was learnt."""
    seconds: dict[str, float]
    splits: dict[str, Split]


def run_stream(
    method: Method,
    backbone: Backbone,
    tasks: Sequence[Task],
    train: TrainSettings,
    *,
    seed: int = 0,
    evaluate_with: str = "snapshot",
    inner_rows: int | None = INNER_CELL_ROWS,
    report: Report | None = None,
    after_task: Callable[[Task, Any, float], None] | None = None,
) -> StreamResult:
    """Learn the tasks one after another and measure every earlier one again each time.

    Args:
        method: What learns.
        backbone: The frozen model it learns on.
        tasks: The stream.
        train: For the few-shot split; the method has its own copy.
        seed: Of the run: splits, initialisation and data order.
        evaluate_with: `snapshot` answers each task with its own finished vectors; `current` is the
            diagnostic that answers all of them with today's shared prefix and queue.
        inner_rows: Test rows of the cells that neither the diagonal nor the last row needs; None for all.
        report: Called after every epoch.
        after_task: Called with each finished task, the state and its test score.
    """
    if evaluate_with not in EVALUATE_WITH:
        raise ConfigError(unknown("evaluation mode", evaluate_with, EVALUATE_WITH))
    names = tuple(task.name for task in tasks)
    splits = {task.name: task.split(train.shots, seed, train.validation_limit) for task in tasks}
    matrix = np.full((len(tasks) + 1, len(tasks)), np.nan)
    when_learnt: dict[str, Tensor] = {}
    unchanged: dict[str, bool] = {}
    seconds: dict[str, float] = {}
    state = method.start(seed)
    _measure_untaught(matrix, 0, backbone, state, tasks, splits, inner_rows)
    for i, task in enumerate(tasks, start=1):
        began = time.perf_counter()
        state = method.learn(state, task, splits[task.name], report)
        seconds[task.name] = time.perf_counter() - began
        is_last = i == len(tasks)
        for j, earlier in enumerate(tasks[:i]):
            whole = is_last or j == i - 1
            rows = splits[earlier.name].test
            rows = rows if whole else _sample(rows, earlier.name, inner_rows)
            snapshot = _view(state, earlier.name, evaluate_with)
            found = predict_log_probs(backbone, snapshot, rows.texts)
            matrix[i, j] = _score(earlier, rows, found)
            if j == i - 1:
                when_learnt[earlier.name] = found
            if is_last:
                again = predict_log_probs(backbone, snapshot, rows.texts) if j == i - 1 else found
                unchanged[earlier.name] = torch.equal(again, when_learnt[earlier.name])
        _measure_untaught(matrix, i, backbone, state, tasks[i : i + 1], splits, inner_rows)
        if after_task:
            after_task(task, state, matrix[i, i - 1])
    return StreamResult(names, state, matrix, unchanged, seconds, splits)


def _view(state: Any, name: str, evaluate_with: str) -> Snapshot:
    snapshot: Snapshot = state.snapshots[name]
    if evaluate_with == "snapshot":
        return snapshot
    if not hasattr(state, "current_layout"):
        raise ConfigError(
            "evaluation mode 'current' needs a method with a queue, such as q-tuning."
        )
    return replace(snapshot, rows=state.current_layout())


def _measure_untaught(
    matrix: Matrix,
    row: int,
    backbone: Backbone,
    state: Any,
    tasks: Sequence[Task],
    splits: dict[str, Split],
    inner_rows: int | None,
) -> None:
    """Scores of tasks not yet learnt, with what earlier ones left; an encoder has no head for them yet."""
    if backbone.needs_head or not hasattr(state, "current_layout"):
        return
    for column, task in enumerate(tasks, start=row):
        rows = _sample(splits[task.name].test, task.name, inner_rows)
        untaught = Snapshot(TaskCard.of(task), state.current_layout())
        found = predict_log_probs(backbone, untaught, rows.texts)
        matrix[row, column] = _score(task, rows, found)


def _score(task: Task, rows: Rows, log_probs: Tensor) -> float:
    return score_predictions(task.metric, rows.labels, log_probs.argmax(dim=-1).tolist())


def _sample(rows: Rows, name: str, size: int | None) -> Rows:
    """The same rows of a task in every run."""
    order = numpy_generator("inner-cells", name).permutation(len(rows))[:size]
    kept = sorted(order.tolist())
    return Rows(tuple(rows.texts[i] for i in kept), tuple(rows.labels[i] for i in kept))
