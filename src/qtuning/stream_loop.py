"""The loop: for each task of a stream, learn it, score what was learnt so far, keep the row.

Several runs (seeds, or orders of as many tasks) go through it together, as lanes of one pack; one run is a pack of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtuning.backbones import Backbone
from qtuning.config import TrainSettings
from qtuning.errors import ConfigError, unknown
from qtuning.evaluation import Matrix, score_parts, score_predictions
from qtuning.keys import Finder, keys_of, read_features, with_key
from qtuning.lanes import FitState, Report, fit_lanes
from qtuning.methods import Method
from qtuning.protocols import make_split
from qtuning.seeding import numpy_generator
from qtuning.snapshots import (
    Snapshot,
    TaskCard,
    answering,
    answers_from_snapshots,
    predict_log_probs,
    predict_together,
)
from qtuning.tasks import Rows, Split, Task, Text

INNER_CELL_ROWS = 64
"""Test rows per task for cells that neither the diagonal nor the last row needs."""
EVALUATE_WITH = ("snapshot", "current")


@dataclass
class StreamRun:
    """One run of a stream: where it stands, and what it measured so far."""

    seed: int
    tasks: tuple[str, ...]
    splits: dict[str, Split]
    state: Any
    matrix: Matrix
    """R[i, j] of shape [tasks + 1, tasks]; nan where nothing was measured."""
    sampled: Matrix
    """The same with every cell of a column on the same few rows, so that cells can be compared."""
    seconds: dict[str, float] = field(default_factory=dict)
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """For each task every metric of its own, on its test rows, when the stream ended."""
    when_learnt: dict[str, Tensor] = field(default_factory=dict)
    """Log-probabilities of the test rows when a task was learnt."""
    unchanged: dict[str, bool | None] = field(default_factory=dict)
    """For each task whether its scores at the end are, byte for byte, those when it was learnt; None if unknown."""
    found: dict[str, dict[str, float]] = field(default_factory=dict)
    """For each task, at the end, of its test rows without the task: shares whose task was found, and answered right."""
    done: int = 0
    """Tasks learnt and scored."""


class Journal:
    """What keeps a pack's progress; this one keeps nothing. See `records.RunJournal`."""

    def resume(self, runs: Sequence[StreamRun]) -> list[FitState] | None:
        """Put the runs where they stood; the lanes' training, if a task was under way."""
        return None

    def epoch(self, runs: Sequence[StreamRun], fits: list[FitState]) -> None:
        """All lanes ended an epoch."""

    def task(self, runs: Sequence[StreamRun]) -> None:
        """All runs learnt and scored a task, each its own."""


def run_streams(
    method: Method,
    backbone: Backbone,
    streams: Sequence[tuple[Sequence[Task], int]],
    train: TrainSettings,
    *,
    protocol: str = "given",
    test_limit: int = 0,
    evaluate_with: str = "snapshot",
    inner_rows: int | None = INNER_CELL_ROWS,
    report: Report | None = None,
    after_task: Callable[[Task, Sequence[StreamRun]], None] | None = None,
    journal: Journal | None = None,
) -> list[StreamRun]:
    """Learn the tasks one after another and measure every earlier one again each time.

    Args:
        method: What learns.
        backbone: The frozen model it learns on.
        streams: For each run its tasks, of which all runs have the same number, and its seed: splits, initialisation
            and data order.
        train: For the split; the method has its own copy.
        protocol: Which rows train, validate and test; see `protocols`.
        test_limit: Test rows per class at most; 0 takes all.
        evaluate_with: `snapshot` answers each task with its own finished vectors; `current` is the
            diagnostic that answers all of them with today's shared prefix and queue.
        inner_rows: Test rows of the cells that neither the diagonal nor the last row needs; None for all.
        report: Called after every epoch of every lane.
        after_task: Called with each finished task and the runs that learnt it.
        journal: Keeps the progress on disk, so that a killed pack can go on.
    """
    if evaluate_with not in EVALUATE_WITH:
        raise ConfigError(unknown("evaluation mode", evaluate_with, EVALUATE_WITH))
    journal = journal or Journal()
    runs = [_begin(method, tasks, train, seed, protocol, test_limit) for tasks, seed in streams]
    orders = [tasks for tasks, _ in streams]
    fits = journal.resume(runs)
    if runs[0].done == 0 and fits is None:
        for run, tasks in zip(runs, orders, strict=True):
            _measure_untaught(run, 0, backbone, tasks, inner_rows)
    for i in range(runs[0].done + 1, len(orders[0]) + 1):
        began = time.perf_counter()
        now = [tasks[i - 1] for tasks in orders]
        _learn(method, backbone, runs, now, train, report, journal, fits)
        fits = None
        for run, task in zip(runs, now, strict=True):
            run.state = with_key(backbone, run.state, task.name, run.splits[task.name])
        seconds = (time.perf_counter() - began) / len(runs)  # before anything is scored
        for run, tasks, task in zip(runs, orders, now, strict=True):
            run.seconds[task.name] = seconds
            _measure_taught(run, i, backbone, tasks, evaluate_with, inner_rows)
            _measure_untaught(run, i, backbone, tasks[i : i + 1], inner_rows)
            run.done = i
        journal.task(runs)
        for name, task in {task.name: task for task in now}.items():
            if after_task:
                after_task(task, [run for run in runs if run.tasks[i - 1] == name])
    return runs


def run_stream(
    method: Method,
    backbone: Backbone,
    tasks: Sequence[Task],
    train: TrainSettings,
    seed: int = 0,
    **options: Any,
) -> StreamRun:
    """`run_streams` for a single run."""
    return run_streams(method, backbone, [(tasks, seed)], train, **options)[0]


def _begin(
    method: Method,
    tasks: Sequence[Task],
    train: TrainSettings,
    seed: int,
    protocol: str,
    test_limit: int,
) -> StreamRun:
    splits = {
        task.name: make_split(protocol, task, train.shots, seed, train.validation_limit, test_limit)
        for task in tasks
    }
    matrix = np.full((len(tasks) + 1, len(tasks)), np.nan)
    names = tuple(task.name for task in tasks)
    return StreamRun(seed, names, splits, method.start(seed), matrix, matrix.copy())


def _learn(
    method: Any,
    backbone: Backbone,
    runs: Sequence[StreamRun],
    tasks: Sequence[Task],
    train: TrainSettings,
    report: Report | None,
    journal: Journal,
    fits: list[FitState] | None,
) -> None:
    """One more task for every run, each its own: as lanes of a pack, or one by one for methods without lanes."""
    if not hasattr(method, "lane"):
        for run, task in zip(runs, tasks, strict=True):
            run.state = method.learn(run.state, task, run.splits[task.name], report)
        return
    lanes = [
        method.lane(run.state, task, run.splits[task.name])
        for run, task in zip(runs, tasks, strict=True)
    ]
    facts = fit_lanes(
        backbone,
        lanes,
        train,
        report,
        checkpoint=lambda now: journal.epoch(runs, now),
        resume=fits,
        tasks_ahead=len(runs[0].tasks) - runs[0].done,
    )
    for run, lane, found in zip(runs, lanes, facts, strict=True):
        run.state = lane.finish(found)


def _measure_taught(
    run: StreamRun,
    i: int,
    backbone: Backbone,
    tasks: Sequence[Task],
    evaluate_with: str,
    inner_rows: int | None,
) -> None:
    """Row i of the matrix up to its diagonal; of a method that adapts to every text, the last row alone."""
    is_last = i == len(tasks)
    if hasattr(run.state, "adapted") and not is_last:
        run.when_learnt[tasks[i - 1].name] = torch.zeros(0)
        return
    finders = {p: Finder(keys_of(run.state.snapshots, p)) for p in (False, True)} if is_last else {}
    if not is_last:
        _measure_inner(run, i, backbone, tasks[: i - 1], evaluate_with, inner_rows)
    for j, task in enumerate(tasks[:i]) if is_last else [(i - 1, tasks[i - 1])]:
        rows = run.splits[task.name].test
        sample = _sample_places(len(rows), task.name, inner_rows)
        found = _log_probs(run.state, backbone, task.name, rows.texts, evaluate_with)
        run.matrix[i, j] = _score(task, rows, found)
        run.sampled[i, j] = _score(task, rows.at(sample), found[sample])
        if j == i - 1:
            run.when_learnt[task.name] = found
        if is_last:
            again = (
                _log_probs(run.state, backbone, task.name, rows.texts, evaluate_with)
                if j == i - 1
                else found
            )
            then = run.when_learnt[task.name]
            run.unchanged[task.name] = torch.equal(again, then) if len(then) else None
            guess = found.argmax(dim=-1).tolist()
            run.parts[task.name] = score_parts(task.metric, rows.labels, guess, rows.groups)
            run.found[task.name] = _task_free(finders[task.is_pair], backbone, task, rows, guess)


def _measure_inner(
    run: StreamRun,
    i: int,
    backbone: Backbone,
    earlier: Sequence[Task],
    evaluate_with: str,
    inner_rows: int | None,
) -> None:
    """Row i of the matrix left of its diagonal, on a few rows of each task; in one go where that is possible."""
    asked: list[Rows] = []
    for task in earlier:
        rows = run.splits[task.name].test
        asked.append(rows.at(_sample_places(len(rows), task.name, inner_rows)))
    if answers_from_snapshots(run.state) and evaluate_with == "snapshot":
        snapshots = [run.state.snapshots[task.name] for task in earlier]
        pairs = [(own, rows.texts) for own, rows in zip(snapshots, asked, strict=True)]
        found = predict_together(backbone, pairs)
    else:
        found = [
            _log_probs(run.state, backbone, task.name, rows.texts, evaluate_with)
            for task, rows in zip(earlier, asked, strict=True)
        ]
    for j, (task, rows, own) in enumerate(zip(earlier, asked, found, strict=True)):
        run.matrix[i, j] = run.sampled[i, j] = _score(task, rows, own)


def _task_free(
    finder: Finder, backbone: Backbone, task: Task, rows: Rows, guess: Sequence[int]
) -> dict[str, float]:
    """Shares of rows whose task is found by its key, and whose label is right as well."""
    found = finder.find(read_features(backbone, rows.texts))
    is_found = [each.task == task.name for each in found]
    right = [f and g == y for f, g, y in zip(is_found, guess, rows.labels, strict=True)]
    return {"found": float(np.mean(is_found)), "task_free_accuracy": float(np.mean(right))}


def _measure_untaught(
    run: StreamRun, i: int, backbone: Backbone, tasks: Sequence[Task], inner_rows: int | None
) -> None:
    """Scores of tasks not yet learnt, with what earlier ones left; an encoder has no head for them yet."""
    if backbone.needs_head or not hasattr(run.state, "current_layout"):
        return
    for column, task in enumerate(tasks, start=i):
        rows = run.splits[task.name].test
        rows = rows.at(_sample_places(len(rows), task.name, inner_rows))
        untaught = Snapshot(TaskCard.of(task), run.state.current_layout())
        found = predict_log_probs(backbone, untaught, rows.texts)
        run.matrix[i, column] = _score(task, rows, found)


def _log_probs(
    state: Any, backbone: Backbone, name: str, texts: Sequence[Text], evaluate_with: str
) -> Tensor:
    """[texts, labels] of one task, by whatever the state answers it with."""
    found = []
    for model, snapshot, places in answering(backbone, state, name, texts):
        if evaluate_with == "current":
            if not hasattr(state, "current_layout"):
                raise ConfigError(
                    "evaluation mode 'current' needs a method with a queue, such as q-tuning."
                )
            snapshot = replace(snapshot, rows=state.current_layout())
        found.append(predict_log_probs(model, snapshot, [texts[i] for i in places]))
    return torch.cat(found)


def _score(task: Task, rows: Rows, log_probs: Tensor) -> float:
    guess = log_probs.argmax(dim=-1).tolist()
    return score_predictions(task.metric, rows.labels, guess, rows.groups)


def _sample_places(count: int, name: str, size: int | None) -> list[int]:
    """The same rows of a task in every run."""
    order = numpy_generator("inner-cells", name).permutation(count)[:size]
    return sorted(order.tolist())
