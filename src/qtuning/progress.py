"""A live line for learning: task, epoch, loss, validation, time left."""

from __future__ import annotations

import time
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

from qtuning.lanes import Progress as LaneProgress


class LearningBar:
    """A rich progress bar that follows `fit_lanes`; over several tasks it also counts them."""

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
        self._tasks = tasks
        self._id: TaskID | None = None
        self._lanes: dict[str, int] = {}
        self._epochs, self._began = 0, time.perf_counter()

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
        self._lanes[now.lane] = now.epochs
        ahead = (
            self._tasks - len(self._lanes)
        ) * now.epochs  # those that have not begun, if all are alike
        total = sum(self._lanes.values()) + ahead
        if self._id is None:
            self._id = self._bar.add_task("", total=total, status="")
        self._epochs += 1
        rate = self._epochs / (time.perf_counter() - self._began)
        count = f"[{len(self._lanes)}/{self._tasks}] " if self._tasks > 1 else ""
        validation = "" if now.validation is None else f"  validation {now.validation:.1%}"
        self._bar.update(
            self._id,
            total=total,
            completed=self._epochs,
            description=f"{count}{now.lane}",
            status=f"epoch {now.epoch}/{now.epochs}  loss {now.loss:.3f}{validation}  {rate:.1f} epochs/s",
        )
