"""How far learning is: a live line on a terminal, now and then a plain one in a log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from qtuning.backbones import Backbone
from qtuning.lanes import Progress as LaneProgress
from qtuning.stream_loop import StreamRun

SECONDS_BETWEEN_LINES = 30.0
"""In a log, where no line can be written over: long enough for a night's run to be read in the morning."""


class LearningBar:
    """Follows `fit_lanes`: task, epoch, loss, validation, time left. Over several tasks it also counts them.

    A bar where `console` is a terminal; else a line on standard error from time to time.
    """

    def __init__(self, tasks: int = 1, console: Console | None = None, quiet: bool = False):
        self.console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self._log = None if quiet or self.console.is_terminal else Console(stderr=True)
        self._id: TaskID | None = None
        self.begin(tasks)

    def begin(self, tasks: int, learnt: int = 0) -> None:
        """Count towards so many tasks, from those that were learnt before."""
        if self._id is not None:
            self._bar.remove_task(self._id)
        self._tasks, self._learnt, self._id = tasks, learnt, None
        self._lanes: dict[str, int] = {}
        self._epochs, self._began = 0, time.perf_counter()
        self._said = self._began

    def started(self, backbone: Backbone, runs: Sequence[StreamRun]) -> None:
        """Count towards all tasks of these runs, from those behind them; towards one where all are learnt at once."""
        tasks = sum(1 if run.learns_last else len(run.tasks) for run in runs)
        self.begin(tasks, sum(0 if run.learns_last else run.done for run in runs))

    def __enter__(self) -> LearningBar:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, now: LaneProgress) -> None:
        """Show one lane after an epoch."""
        # epochs that it reports: one that goes on in the middle has some behind it
        self._lanes.setdefault(now.lane, now.epochs - now.epoch + 1)
        begun = self._learnt + len(self._lanes)
        # those that have not begun, if all are alike
        total = sum(self._lanes.values()) + (self._tasks - begun) * now.epochs
        if self._id is None:
            self._id = self._bar.add_task("", total=total, status="")
        self._epochs += 1
        count = f"[{begun}/{self._tasks}] " if self._tasks > 1 else ""
        name = f"{count}{now.lane}"
        validation = "" if now.validation is None else f"  validation {now.validation:.1%}"
        status = f"epoch {now.epoch}/{now.epochs}  loss {now.loss:.3f}{validation}"
        self._bar.update(
            self._id, total=total, completed=self._epochs, description=name, status=status
        )
        if self._log and time.perf_counter() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.perf_counter()
            passed = (self._said - self._began) / 60
            left = passed * (total / self._epochs - 1)
            said = f"{name}  {status}  {passed:.0f} min, about {left:.0f} left"
            self._log.print(said, highlight=False, markup=False, soft_wrap=True)
