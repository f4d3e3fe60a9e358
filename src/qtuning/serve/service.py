"""A collection that answers, learns and forgets while it runs; nothing here knows HTTP.

Answering never waits for teaching: a predictor does not change, a new one takes its place, and teaching has modules of
its own on the same weights. Several processes may share the folder: whoever changes it holds a lock, the
others notice and follow.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import RLock, Thread
from typing import Any

from qtuning.collection import TRIES
from qtuning.config import settings_dict
from qtuning.errors import CollectionError, QTuningError, TaskError, unknown
from qtuning.files import held, sha256_of
from qtuning.fit import FitState
from qtuning.lanes import Progress
from qtuning.predictor import Answer
from qtuning.serve.teaching import (
    ENDED,
    FOLDER,
    Owner,
    Stopped,
    Teaching,
    read_teaching,
    read_teachings,
    sweep_owners,
)
from qtuning.snapshots import added, answers_from_snapshots
from qtuning.tasks import Task, Text
from qtuning.tuner import QTuner

log = logging.getLogger("qtuning.serve")
MOST_TEACHINGS = 32
"""That wait, at most."""
REMEMBERED_TEACHINGS = 200
"""Reports of ended teachings that are kept."""
RETRY_SECONDS = 1.0
"""Between two tries to write how a teaching ended."""
STAYS = "What the queue and the shared prefix learnt from it stays in them."


class Service:
    """One open collection."""

    def __init__(self, folder: Path, **how: Any):
        """`how` goes to `QTuner.from_pretrained`: model, dtype, device."""
        self.folder = folder
        self.tuner = QTuner.from_pretrained(folder, **how)
        if not answers_from_snapshots(self.tuner.state):
            raise CollectionError(
                f"{folder} was made by {self.tuner.method_name!r}, whose tasks move with every new one; serve a "
                f"collection of a method that keeps them, such as q-tuning."
            )
        self.predictor = self.tuner.predictor
        self.predictor.prepare()
        self._owner = Owner(folder)
        self._teacher = self._make_teacher()  # before any pass: a twin copies settings too
        self._changing = RLock()
        sweep_owners(folder)
        self._todo: SimpleQueue[Teaching | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_closed = False

    @property
    def process(self) -> str:
        """A name for this process."""
        return self._owner.name

    def _make_teacher(self) -> QTuner:
        """A tuner like ours, on modules of its own."""
        tuner = self.tuner
        settings = settings_dict(tuner.method_settings, tuner.train_settings)
        twin = tuner.backbone.twin()
        return QTuner(twin, method=tuner.method_name, seed=tuner.seed, **settings)

    # ── answering ────────────────────────────────────────────────────────────────────────────

    def answer(self, texts: Sequence[Text], tasks: Sequence[str | None]) -> list[Answer]:
        """By whatever is known now."""
        return self.predictor.answer(texts, tasks)

    def refresh(self) -> None:
        """Follow what another process did to the collection."""
        with self._changing:
            self.tuner.refresh()
            if self.predictor is not self.tuner.predictor:  # also where an earlier switch failed
                self._switch()

    def _switch(self) -> None:
        predictor = self.tuner.predictor
        predictor.prepare()  # here, not at the next question
        self.predictor = predictor

    # ── changing ─────────────────────────────────────────────────────────────────────────────

    def remove(self, name: str) -> None:
        """Forget a task's snapshot and key."""

        def without(state: Any) -> Any:
            if name not in state.snapshots:
                raise TaskError(unknown("task", name, state.snapshots))
            return replace(state, snapshots={k: s for k, s in state.snapshots.items() if k != name})

        self._commit(without)
        log.info("removed task %r", name)

    def _commit(self, change: Callable[[Any], Any]) -> None:
        """Change the newest state, on disk first: what is answered from is never ahead of what is kept.

        A save is refused when another process saved since: then its state is the newest.
        """
        with self._changing:
            for attempt in range(TRIES):
                self.refresh()
                before = self.tuner.state
                self.tuner.adopt(change(before))
                try:
                    self.tuner.save_pretrained(self.folder)
                    break
                except BaseException as error:
                    self.tuner.adopt(before)
                    if not isinstance(error, CollectionError) or attempt == TRIES - 1:
                        raise
            self._switch()

    # ── teaching ─────────────────────────────────────────────────────────────────────────────

    def teach(self, task: Task, replace_old: bool = False) -> Teaching:
        """Accept a task; it is learnt when those before it are."""
        with self._changing, held(self.folder / FOLDER):
            if task.name in self.predictor.snapshots and not replace_old:
                raise Taken(
                    f"a task named {task.name!r} is already in the collection; rename it, or replace it."
                )
            waiting = [t for t in self.teachings().values() if t.state not in ENDED]
            if any(t.task == task.name for t in waiting):
                raise Taken(f"a task named {task.name!r} is being taught already; wait for it.")
            if len(waiting) >= MOST_TEACHINGS:
                raise TooMany(f"{len(waiting)} tasks wait to be taught; try again later.")
            self._forget_old_reports()
            return self._queue(Teaching.of(task, replace_old, self.folder, self._owner.name))

    def go_on(self, name: str) -> Teaching:
        """Continue a teaching that was stopped."""
        with self._changing, held(self.folder / FOLDER):
            teaching = self.teaching(name)
            if teaching.state != "stopped":
                raise Taken(f"teaching {name!r} is {teaching.state}; only a stopped one continues.")
            return self._queue(teaching)

    def forget(self, name: str) -> None:
        """Give up a teaching that has ended, and what was uploaded for it."""
        with self._changing, held(self.folder / FOLDER):
            teaching = self.teaching(name)
            if teaching.state not in ENDED:
                raise Taken(f"teaching {name!r} is {teaching.state}; cancel it first.")
            teaching.forget(with_report=True)

    def cancel(self, name: str) -> Teaching:
        """Stop after the epoch under way, whichever process teaches it; it can be continued."""
        teaching = self.teaching(name)
        if teaching.state in ("done", "failed"):
            raise Taken(f"teaching {name!r} is {teaching.state} already.")
        teaching.ask_to_stop()
        return teaching

    def teachings(self) -> dict[str, Teaching]:
        """Tasks that are, were or wait to be taught, by any process; oldest first."""
        return read_teachings(self.folder)

    def teaching(self, name: str) -> Teaching:
        """By its id."""
        found = read_teaching(self.folder, name)
        if found is None:
            raise TaskError(unknown("teaching", name, self.teachings()))
        return found

    def close(self) -> None:
        """Stop teaching after the epoch under way; it can be continued when the collection is opened again."""
        self._is_closed = True
        if self._thread:
            self._todo.put(None)
            self._thread.join()
        self._owner.leave()

    def _forget_old_reports(self) -> None:
        ended = [t for t in self.teachings().values() if t.state in ("done", "failed")]
        for teaching in ended[:-REMEMBERED_TEACHINGS]:
            teaching.forget(with_report=True)

    def _queue(self, teaching: Teaching) -> Teaching:
        teaching.owner = self._owner.name
        teaching.may_go_on()
        teaching.say(state="waiting", message="")
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._work, name="teacher", daemon=True)
            self._thread.start()
        self._todo.put(teaching)
        return teaching

    def _work(self) -> None:
        while (teaching := self._todo.get()) is not None:
            try:
                self._learn(teaching)
            except Stopped:
                self._end(teaching, "stopped", message=f"stopped after epoch {teaching.epoch}")
            except Exception as error:
                said = str(error)
                if not isinstance(error, QTuningError):
                    said = f"{type(error).__name__}: {said}"
                log.warning("teaching %r failed: %s", teaching.task, said)
                self._end(teaching, "failed", message=said)

    def _learn(self, teaching: Teaching) -> None:
        def stop_if_asked() -> None:
            if teaching.is_to_stop or self._is_closed:
                raise Stopped

        # one at a time: each builds on the queue of the one before
        with _held_unless(self.folder / FOLDER / "now.lock", stop_if_asked):
            self.refresh()
            teacher = self._teacher
            teacher.adopt(self.tuner.state)
            mark = _mark(teacher, teacher.state)

            def after_epoch(now: Progress) -> None:
                teaching.after_epoch(now)
                if not hasattr(teacher.method, "lane"):
                    stop_if_asked()

            def checkpoint(fit: FitState) -> None:
                teaching.save_fit((fit[0], {**fit[1], "mark": mark}))
                stop_if_asked()

            teaching.say(state="running")
            result = teacher.learn(
                teaching.make_task(),
                replace=teaching.replace,
                progress=False,
                report=after_epoch,
                checkpoint=checkpoint,
                resume=_still_fits(teaching.saved_fit(), mark),
            )
            new = teacher.state.snapshots[teaching.task]

            def with_new(now: Any) -> Any:
                """Tasks as they are now, less what was removed meanwhile; a queue that others changed stays theirs."""
                base = teacher.state if _mark(self.tuner, now) == mark else now
                return replace(base, snapshots=added(now.snapshots, new))

            self._commit(with_new)
            result["version"] = self.tuner.version(teaching.task)
        log.info("taught task %r", teaching.task)
        self._end(teaching, "done", result=_plain(result))

    def _end(self, teaching: Teaching, state: str, **news: Any) -> None:
        """Report an end, as soon as the disk takes it: a teaching that seems to run keeps its name taken."""
        for attempt in count():
            try:
                if state != "stopped":
                    teaching.forget()
                teaching.say(state=state, **news)
                return
            except OSError as error:
                if attempt == 0:
                    log.warning(
                        "cannot write that teaching %r is %s (%s); trying until it can be written",
                        teaching.task, state, error,
                    )  # fmt: skip
            if self._is_closed:
                return
            time.sleep(RETRY_SECONDS)


class Taken(TaskError):
    """What is asked for stands against what is there."""


class TooMany(QTuningError):
    """Teachings that wait already."""


@contextmanager
def _held_unless(file: Path, stop_if_asked: Callable[[], None]) -> Iterator[None]:
    """A lock among processes; one may be asked to stop while waiting for it."""
    with file.open("w") as stream:
        while True:
            stop_if_asked()
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield


def _mark(tuner: QTuner, state: Any) -> str:
    """By which one sees whether a training still stands on the same queue and shared prefix."""
    tensors, facts = tuner.method.pack(state)
    parts = [tensors[name].detach().cpu().numpy().tobytes() for name in sorted(tensors)]
    return sha256_of(b"".join(parts) + repr(facts).encode())


def _still_fits(fit: FitState | None, mark: str) -> FitState | None:
    """What was kept of a training, if it was on this state."""
    if fit is None or fit[1].get("mark") != mark:
        return None
    return fit[0], {key: value for key, value in fit[1].items() if key != "mark"}


def _plain(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a learnt task scored and cost."""
    names = ("task", "version", "validation_score", "test_score", "seconds", "split", "notes")
    return {name: result[name] for name in names if name in result}
