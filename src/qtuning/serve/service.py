"""A collection that answers, learns and forgets while it runs; nothing here knows HTTP.

Answering never waits for teaching: a predictor does not change, a new one takes its place, and teaching has modules of
its own on the same weights. Several processes may share the folder: whoever changes it holds a lock, the
others notice and follow.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import RLock, Thread
from typing import Any

from qtuning.errors import CollectionError, QTuningError, TaskError, unknown
from qtuning.files import sha256_of
from qtuning.lanes import FitState, Progress
from qtuning.predictor import Answer
from qtuning.serve.teaching import (
    ENDED,
    Owner,
    Stopped,
    Teaching,
    read_teaching,
    read_teachings,
)
from qtuning.snapshots import answers_from_snapshots
from qtuning.tasks import Task, Text
from qtuning.tuner import QTuner

log = logging.getLogger("qtuning.serve")
MOST_TEACHINGS = 32
"""That wait, at most."""
REMEMBERED_TEACHINGS = 200
"""Reports of ended teachings that are kept."""
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
        self._teacher: QTuner | None = None
        self._changing = RLock()
        self._todo: SimpleQueue[Teaching | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_closed = False

    @property
    def process(self) -> str:
        """A name for this process."""
        return self._owner.name

    # ── answering ────────────────────────────────────────────────────────────────────────────

    def answer(self, texts: Sequence[Text], tasks: Sequence[str | None]) -> list[Answer]:
        """By whatever is known now."""
        return self.predictor.answer(texts, tasks)

    def refresh(self) -> None:
        """Follow what another process did to the collection."""
        with self._changing:
            if self.tuner.refresh():
                self._switch()

    def _switch(self) -> None:
        predictor = self.tuner.predictor
        predictor.prepare()  # here, not at the next question
        self.predictor = predictor

    # ── changing ─────────────────────────────────────────────────────────────────────────────

    def remove(self, name: str) -> None:
        """Forget a task's snapshot and key."""
        with self._change():
            if name not in self.tuner.state.snapshots:
                raise TaskError(unknown("task", name, self.tuner.state.snapshots))
            left = {k: s for k, s in self.tuner.state.snapshots.items() if k != name}
            self._commit(replace(self.tuner.state, snapshots=left))
        log.info("removed task %r", name)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Alone with the newest collection, among threads and processes."""
        with self._changing, _held(self.folder / ".change"):
            self.refresh()
            yield

    def _commit(self, state: Any) -> None:
        """On disk first: what is answered from is never ahead of what is kept."""
        before = self.tuner.state
        self.tuner.adopt(state)
        try:
            self.tuner.save_pretrained(self.folder)
        except BaseException:
            self.tuner.adopt(before)
            raise
        self._switch()

    # ── teaching ─────────────────────────────────────────────────────────────────────────────

    def teach(self, task: Task, replace_old: bool = False) -> Teaching:
        """Accept a task; it is learnt when those before it are."""
        if task.name in self.predictor.snapshots and not replace_old:
            raise TaskError(
                f"a task named {task.name!r} is already in the collection; rename it, or replace it."
            )
        waiting = [t for t in self.teachings().values() if t.state not in ENDED]
        if any(t.task == task.name for t in waiting):
            raise TaskError(f"a task named {task.name!r} is being taught already; wait for it.")
        if len(waiting) >= MOST_TEACHINGS:
            raise TooMany(f"{len(waiting)} tasks wait to be taught; try again when some are done.")
        self._forget_old_reports()
        return self._queue(Teaching.of(task, replace_old, self.folder, self._owner.name))

    def go_on(self, name: str) -> Teaching:
        """Continue a teaching that was stopped."""
        teaching = self.teaching(name)
        if teaching.state != "stopped":
            raise TaskError(f"teaching {name!r} is {teaching.state}; only a stopped one continues.")
        return self._queue(teaching)

    def cancel(self, name: str) -> Teaching:
        """Stop after the epoch under way, whichever process teaches it; it can be continued."""
        teaching = self.teaching(name)
        if teaching.state in ("done", "failed"):
            raise TaskError(f"teaching {name!r} is {teaching.state} already.")
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
        if self._thread is None:
            self._thread = Thread(target=self._work, name="teacher", daemon=True)
            self._thread.start()
        self._todo.put(teaching)
        return teaching

    def _work(self) -> None:
        while (teaching := self._todo.get()) is not None:
            try:
                self._learn(teaching)
            except Stopped:
                teaching.say(state="stopped", message=f"stopped after epoch {teaching.epoch}")
            except Exception as error:
                said = str(error)
                if not isinstance(error, QTuningError):
                    said = f"{type(error).__name__}: {said}"
                log.warning("teaching %r failed: %s", teaching.task, said)
                teaching.forget()
                teaching.say(state="failed", message=said)

    def _learn(self, teaching: Teaching) -> None:
        def stop_if_asked() -> None:
            if teaching.is_to_stop or self._is_closed:
                raise Stopped

        stop_if_asked()
        # one at a time: each builds on the queue of the one before
        with _held(self.folder / ".teach"):
            self.refresh()
            teacher = self._ready_teacher()
            mark = _mark(teacher)

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
            with self._change():
                known = self.tuner.state.snapshots  # less what was removed meanwhile
                new = teacher.state.snapshots[teaching.task]
                self._commit(replace(teacher.state, snapshots={**known, teaching.task: new}))
        teaching.forget()
        teaching.say(state="done", result=_plain(result))
        log.info("taught task %r", teaching.task)

    def _ready_teacher(self) -> QTuner:
        """A tuner like ours, on modules of its own."""
        if self._teacher is None:
            settings = {**_fields(self.tuner.method_settings), **_fields(self.tuner.train_settings)}
            self._teacher = QTuner(
                self.tuner.backbone.twin(),
                method=self.tuner.method_name,
                seed=self.tuner.seed,
                **settings,
            )
        self._teacher.adopt(self.tuner.state)
        return self._teacher


class TooMany(QTuningError):
    """Teachings that wait already."""


@contextmanager
def _held(file: Path) -> Iterator[None]:
    """A lock among processes; the system lets go of it when its holder dies."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _mark(tuner: QTuner) -> str:
    """By which one sees whether a training still stands on the same queue and shared prefix."""
    tensors, facts = tuner.method.pack(tuner.state)
    parts = [tensors[name].detach().cpu().numpy().tobytes() for name in sorted(tensors)]
    return sha256_of(b"".join(parts) + repr(facts).encode())


def _still_fits(fit: FitState | None, mark: str) -> FitState | None:
    """What was kept of a training, if it was on this state."""
    if fit is None or fit[1].get("mark") != mark:
        return None
    return fit[0], {key: value for key, value in fit[1].items() if key != "mark"}


def _fields(settings: Any) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def _plain(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a learnt task scored and cost."""
    names = ("task", "version", "validation_score", "test_score", "seconds", "split", "notes")
    return {name: result[name] for name in names if name in result}
