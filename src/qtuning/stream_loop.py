"""The loop: for each task of a stream, learn it, score what was learnt so far, keep the row.

Several runs (seeds, orders of as many tasks, other methods and settings) go through it together, as lanes of one pack;
one run is a pack of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtuning.backbones import Backbone
from qtuning.config import TrainSettings
from qtuning.errors import ConfigError, TaskError, unknown
from qtuning.evaluation import Matrix, score_parts, score_predictions
from qtuning.fit import FitState
from qtuning.keys import Finder, keys_of, learn_keys, read_features, with_key
from qtuning.lanes import Report, fit_lanes
from qtuning.methods import Method
from qtuning.protocols import make_split
from qtuning.seeding import numpy_generator
from qtuning.snapshots import (
    EVALUATE_WITH,
    Snapshot,
    TaskCard,
    answering,
    answers_from_snapshots,
    check_diagnostic,
    predict_log_probs,
    predict_together,
    snapshot_for,
)
from qtuning.tasks import Rows, Split, Task, Text

INNER_CELL_ROWS = 64
"""Test rows per task for cells that neither the diagonal nor the last row needs."""
CELLS_AT_ONCE = 256
"""Tasks of runs that are asked in one go, …"""
ROWS_AT_ONCE = 16_384
"""… and their texts: enough to fill a card, and no more memory for more runs or tasks."""
REMEMBERED = 128
"""Lists of texts whose features are remembered."""


@dataclass(frozen=True)
class Course:
    """What one run learns, in which order, and how."""

    method: Method
    tasks: Sequence[Task]
    seed: int
    """Of splits, initialisation and data order."""
    train: TrainSettings
    """For the splits and the engine; the method has its own copy."""
    label: str = ""
    """Tells it from others of its pack, where task and seed do not."""

    def name_of(self, lane: str) -> str:
        """A lane's name that no other of the pack has."""
        return f"{lane}, {self.label}" if self.label else lane


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
    asked_last: bool = False
    """Whether it is asked when the stream ends, and not before: every answer costs steps, or it learns only then."""
    learns_last: bool = False
    """Whether it puts tasks by, and learns all of them with the last."""


Cell = tuple[StreamRun, int, Task, Rows]
"""A run, a column of its matrix, the task and the rows that are asked."""


class Journal:
    """What keeps a pack's progress; this one keeps nothing. See `records.RunJournal`."""

    def resume(self, runs: Sequence[StreamRun]) -> list[FitState] | None:
        """Put the runs where they stood; the lanes' training, if a task was under way."""
        return None

    def epoch(self, runs: Sequence[StreamRun], fits: list[FitState]) -> None:
        """Some or all lanes ended an epoch."""

    def task(self, runs: Sequence[StreamRun]) -> None:
        """All runs learnt and scored a task, each its own."""


def run_streams(
    backbone: Backbone,
    courses: Sequence[Course],
    *,
    protocol: str = "given",
    test_limit: int = 0,
    evaluate_with: str = "snapshot",
    inner_rows: int | None = INNER_CELL_ROWS,
    report: Report | None = None,
    after_task: Callable[[Task, Sequence[StreamRun]], None] | None = None,
    started: Callable[[Sequence[StreamRun]], None] | None = None,
    journal: Journal | None = None,
) -> list[StreamRun]:
    """Learn the tasks one after another and measure every earlier one again each time.

    Args:
        backbone: The frozen model that all of them learn on.
        courses: One for each run, with equally many tasks.
        protocol: Which rows train, validate and test; see `protocols`.
        test_limit: Test rows per class at most; 0 takes all.
        evaluate_with: `snapshot` answers each task with its own finished vectors. Two diagnostics: `shared` puts
            today's shared prefix before the rest of them, as if it were kept once for all tasks; `current` answers
            every task with today's shared prefix and queue.
        inner_rows: Test rows of the cells that neither the diagonal nor the last row needs; None for all, 0 to leave
            those cells out, so that a stream's scoring does not grow with the square of its tasks.
        report: Called after every epoch of every lane.
        after_task: Called with each finished task and the runs that learnt it.
        started: Called once with the runs as they stand, before anything more is learnt.
        journal: Keeps the progress on disk, so that a killed pack can go on.
    """
    if evaluate_with not in EVALUATE_WITH:
        raise ConfigError(unknown("evaluation mode", evaluate_with, EVALUATE_WITH))
    journal = journal or Journal()
    runs = [_begin(course, protocol, test_limit) for course in courses]
    for run in runs:
        check_diagnostic(run.state, evaluate_with)
    orders = [course.tasks for course in courses]
    fits = journal.resume(runs)
    if started:
        started(runs)
    if runs[0].done == 0 and fits is None and inner_rows != 0:
        _measure_untaught(runs, 0, backbone, orders, inner_rows)
    for i in range(runs[0].done + 1, len(orders[0]) + 1):
        began = time.perf_counter()
        now = [tasks[i - 1] for tasks in orders]
        _learn(backbone, courses, runs, now, report, journal, fits)
        fits = None
        keys = learn_keys(
            backbone, [run.splits[task.name] for run, task in zip(runs, now, strict=True)]
        )
        for run, task, key in zip(runs, now, keys, strict=True):
            run.state = with_key(run.state, task.name, key)
        seconds = (time.perf_counter() - began) / len(runs)  # before anything is scored
        for run, task in zip(runs, now, strict=True):
            run.seconds[task.name] = seconds
            run.done = i
        _measure_learnt(runs, i, backbone, orders, evaluate_with, inner_rows)
        if i == len(orders[0]):
            _measure_last(runs, backbone, orders, evaluate_with, inner_rows)
        if i < len(orders[0]) and inner_rows != 0:
            _measure_inner(runs, i, backbone, orders, evaluate_with, inner_rows)
            _measure_untaught(runs, i, backbone, [t[i : i + 1] for t in orders], inner_rows)
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
    return run_streams(backbone, [Course(method, tasks, seed, train)], **options)[0]


def _begin(course: Course, protocol: str, test_limit: int) -> StreamRun:
    tasks, seed, train = course.tasks, course.seed, course.train
    names = tuple(task.name for task in tasks)
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(
                f"two tasks of the stream are named {name!r}; rename one, or its file."
            )
    splits = {
        task.name: make_split(protocol, task, train.shots, seed, train.validation_limit, test_limit)
        for task in tasks
    }
    for name, split in splits.items():
        if not len(split.test):
            raise TaskError(
                f"task {name!r} has no row left to test with ({split.sizes}); give it more rows, or fewer shots."
            )
    matrix = np.full((len(tasks) + 1, len(tasks)), np.nan)
    state = course.method.start(seed)
    learns_last = hasattr(course.method, "put_by")
    return StreamRun(
        seed,
        names,
        splits,
        state,
        matrix,
        matrix.copy(),
        asked_last=learns_last or hasattr(state, "adapted"),
        learns_last=learns_last,
    )


def _learn(
    backbone: Backbone,
    courses: Sequence[Course],
    runs: Sequence[StreamRun],
    tasks: Sequence[Task],
    report: Report | None,
    journal: Journal,
    fits: list[FitState] | None,
) -> None:
    """One more task for every run, each its own: as lanes of a pack, or one by one for methods without lanes."""
    methods: list[Any] = [course.method for course in courses]
    if not all(hasattr(method, "lane") for method in methods):
        for course, run, task in zip(courses, runs, tasks, strict=True):
            method: Any = course.method
            split, is_last = run.splits[task.name], run.done + 1 == len(run.tasks)
            if run.learns_last and not is_last:
                run.state = method.put_by(run.state, task, split)
            else:
                run.state = method.learn(run.state, task, split, _told_apart(course, report))
        return
    lanes = [
        method.lane(run.state, task, run.splits[task.name])
        for method, run, task in zip(methods, runs, tasks, strict=True)
    ]
    for lane, course in zip(lanes, courses, strict=True):
        lane.name = course.name_of(lane.name)
    facts = fit_lanes(
        backbone,
        lanes,
        [course.train for course in courses],
        report,
        checkpoint=lambda now: journal.epoch(runs, now),
        resume=fits,
        tasks_ahead=len(runs[0].tasks) - runs[0].done,
    )
    for run, lane, found in zip(runs, lanes, facts, strict=True):
        run.state = lane.finish(found)


def _told_apart(course: Course, report: Report | None) -> Report | None:
    """A report that names the course, too, for methods without lanes."""
    return report and (lambda now: report(replace(now, lane=course.name_of(now.lane))))


def _measure_learnt(
    runs: Sequence[StreamRun],
    i: int,
    backbone: Backbone,
    orders: Sequence[Sequence[Task]],
    evaluate_with: str,
    inner_rows: int | None,
) -> None:
    """The diagonal: the task each run has just learnt, on all of its test rows."""
    cells: list[Cell] = []
    for run, tasks in zip(runs, orders, strict=True):
        task = tasks[i - 1]
        if run.asked_last:
            run.when_learnt[task.name] = torch.zeros(0)
        else:
            cells.append((run, i - 1, task, run.splits[task.name].test))
    for cell, found in _ask(cells, backbone, evaluate_with):
        run, _, task, _ = cell
        run.when_learnt[task.name] = found
        _note(cell, i, found, inner_rows)


def _measure_last(
    runs: Sequence[StreamRun],
    backbone: Backbone,
    orders: Sequence[Sequence[Task]],
    evaluate_with: str,
    inner_rows: int | None,
) -> None:
    """The last row: every task on all of its test rows, and what can be said of it at the end.

    Asked in the company in which it was asked when learnt: only then must the answers be the same bytes.
    """
    count = len(orders[0])
    # runs share most test rows, so they are read once
    features = lru_cache(REMEMBERED)(lambda texts: read_features(backbone, texts))
    finders = {
        (id(run), is_pair): Finder(keys_of(run.state.snapshots, is_pair))
        for run in runs
        for is_pair in (False, True)
    }
    for j in range(count):
        cells: list[Cell] = [
            (run, j, tasks[j], run.splits[tasks[j].name].test)
            for run, tasks in zip(runs, orders, strict=True)
        ]
        for cell, found in _ask(cells, backbone, evaluate_with):
            run, _, task, rows = cell
            _note(cell, count, found, inner_rows)
            then = run.when_learnt[task.name]
            run.unchanged[task.name] = torch.equal(found, then) if len(then) else None
            guess = found.argmax(dim=-1).tolist()
            run.parts[task.name] = score_parts(task.metric, rows.labels, guess, rows.groups)
            run.found[task.name] = _task_free(
                finders[id(run), task.is_pair],
                features(tuple(rows.texts)),
                task,
                rows,
                guess,
            )


def _note(cell: Cell, i: int, found: Tensor, inner_rows: int | None) -> None:
    """Row i of a cell's column: on all test rows, and on the few that every row of the matrix has."""
    run, j, task, rows = cell
    # without inner cells all rows are those that every measured cell has
    sample = _sample_places(len(rows), task.name, inner_rows or None)
    run.matrix[i, j] = _score(task, rows, found)
    run.sampled[i, j] = _score(task, rows.at(sample), found[sample])


def _measure_inner(
    runs: Sequence[StreamRun],
    i: int,
    backbone: Backbone,
    orders: Sequence[Sequence[Task]],
    evaluate_with: str,
    inner_rows: int | None,
) -> None:
    """Row i of the matrices left of their diagonal, on a few rows of each task."""
    cells: list[Cell] = [
        (run, j, task, _sampled(run, task, inner_rows))
        for run, tasks in zip(runs, orders, strict=True)
        if not run.asked_last
        for j, task in enumerate(tasks[: i - 1])
    ]
    for (run, j, task, rows), found in _ask(cells, backbone, evaluate_with):
        run.matrix[i, j] = run.sampled[i, j] = _score(task, rows, found)


def _ask(
    cells: Sequence[Cell], backbone: Backbone, evaluate_with: str
) -> Iterator[tuple[Cell, Tensor]]:
    """Log-probabilities [rows, labels] of every cell: in one go where the frozen model answers, else one by one."""
    together = []
    for cell in cells:
        run, _, task, rows = cell
        if evaluate_with != "snapshot" or answers_from_snapshots(run.state):
            together.append(cell)
        else:
            yield cell, _log_probs(run.state, backbone, task.name, rows.texts)
    for some in _batched(together):
        asked = [
            (snapshot_for(run.state, task.name, evaluate_with), rows.texts)
            for run, _, task, rows in some
        ]
        yield from zip(some, predict_together(backbone, asked), strict=True)


def _task_free(
    finder: Finder, features: Tensor, task: Task, rows: Rows, guess: Sequence[int]
) -> dict[str, float]:
    """Shares of rows whose task is found by its key, and whose label is right as well; from their features [n, h]."""
    found = finder.find(features)
    is_found = [each.task == task.name for each in found]
    right = [f and g == y for f, g, y in zip(is_found, guess, rows.labels, strict=True)]
    return {"found": float(np.mean(is_found)), "task_free_accuracy": float(np.mean(right))}


def _measure_untaught(
    runs: Sequence[StreamRun],
    i: int,
    backbone: Backbone,
    tasks: Sequence[Sequence[Task]],
    inner_rows: int | None,
) -> None:
    """Scores of each run's tasks not yet learnt, with what earlier ones left; an encoder has no head for them yet."""
    if backbone.needs_head:
        return
    together: list[Cell] = []
    for run, ahead in zip(runs, tasks, strict=True):
        if hasattr(run.state, "current_layout"):
            together += [
                (run, j, task, _sampled(run, task, inner_rows))
                for j, task in enumerate(ahead, start=i)
            ]
    for some in _batched(together):
        asked = [
            (Snapshot(TaskCard.of(task), run.state.current_layout()), rows.texts)
            for run, _, task, rows in some
        ]
        for (run, j, task, rows), found in zip(
            some, predict_together(backbone, asked), strict=True
        ):
            run.matrix[i, j] = _score(task, rows, found)


def _log_probs(state: Any, backbone: Backbone, name: str, texts: Sequence[Text]) -> Tensor:
    """[texts, labels] of one task, by whatever the state answers it with."""
    found = [
        predict_log_probs(model, snapshot, [texts[i] for i in places])
        for model, snapshot, places in answering(backbone, state, name, texts)
    ]
    return torch.cat(found)


def _score(task: Task, rows: Rows, log_probs: Tensor) -> float:
    guess = log_probs.argmax(dim=-1).tolist()
    return score_predictions(task.metric, rows.labels, guess, rows.groups)


def _batched(cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    """As many at a time as may be asked in one go, one at least."""
    some: list[Cell] = []
    for cell in cells:
        rows = sum(len(each[3]) for each in (*some, cell))
        if some and (len(some) == CELLS_AT_ONCE or rows > ROWS_AT_ONCE):
            yield some
            some = []
        some.append(cell)
    if some:
        yield some


def _sampled(run: StreamRun, task: Task, size: int | None) -> Rows:
    """A few test rows of a task."""
    rows = run.splits[task.name].test
    return rows.at(_sample_places(len(rows), task.name, size))


def _sample_places(count: int, name: str, size: int | None) -> list[int]:
    """The same rows of a task in every run."""
    order = numpy_generator("inner-cells", name).permutation(count)[:size]
    return sorted(order.tolist())
