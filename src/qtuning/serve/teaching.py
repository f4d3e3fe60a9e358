"""Teaching as a job: it reports, can be stopped and gone on with, and outlives the process that runs it.

What was uploaded lies in the collection's folder from the moment it is accepted, and where the training
stands after every epoch: a teaching that was cut short is `stopped` when the collection is opened again.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from qtuning.errors import TaskError
from qtuning.files import write_atomic
from qtuning.lanes import FitState, Progress
from qtuning.records import read_tensors, write_tensors
from qtuning.tasks import Task

FOLDER = "teaching"
ENDED = ("stopped", "done", "failed")
SHOWN = (
    "id",
    "task",
    "state",
    "epoch",
    "epochs",
    "loss",
    "validation",
    "best",
    "message",
    "result",
)
"""What a client sees."""


class Stopped(Exception):
    """Someone asked a teaching to stop."""


@dataclass
class Teaching:
    """One task being taught."""

    id: str
    task: str
    replace: bool
    examples: dict[str, Any] = field(repr=False)
    """What makes the task again, as JSON."""
    state: str = "waiting"
    """waiting, running, stopped, done or failed."""
    epoch: int = 0
    epochs: int = 0
    loss: float | None = None
    validation: float | None = None
    best: float | None = None
    message: str = ""
    result: dict[str, Any] | None = None
    changes: int = 0
    """Grows with everything that is reported."""
    stop: Event = field(default_factory=Event, repr=False)

    @classmethod
    def of(cls, task: Task, replace: bool) -> Teaching:
        """A new one, waiting."""
        examples = {
            "texts": [list(t) if isinstance(t, tuple) else t for t in task.texts],
            "labels": list(task.labels),
            "label_names": list(task.label_names),
            "label_words": dict(task.label_words or {}),
            "metric": task.metric,
            "splits": list(task.splits) if task.splits else None,
        }
        return cls(secrets.token_hex(6), task.name, replace, examples)

    def make_task(self) -> Task:
        """The task that was uploaded."""
        own = self.examples
        texts = [tuple(t) if isinstance(t, list) else t for t in own["texts"]]
        return Task(self.task, texts, own["labels"], own["label_names"], own["label_words"],
                    own["metric"], splits=own["splits"])  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """What a client sees."""
        return {name: getattr(self, name) for name in SHOWN}

    def say(self, **news: Any) -> None:
        """Report."""
        for name, value in news.items():
            setattr(self, name, value)
        self.changes += 1

    def after_epoch(self, now: Progress) -> None:
        """Report an epoch; stop if asked to."""
        self.say(epoch=now.epoch, epochs=now.epochs, loss=now.loss,
                 validation=now.validation, best=now.best)  # fmt: skip

    # ── on disk ──────────────────────────────────────────────────────────────────────────────

    def save(self, collection: Path) -> None:
        """Keep what was uploaded."""
        kept = {
            "id": self.id,
            "task": self.task,
            "replace": self.replace,
            "examples": self.examples,
        }
        data = json.dumps({**kept, "epoch": self.epoch, "epochs": self.epochs})
        write_atomic(collection / FOLDER / f"{self.id}.json", data.encode())

    def save_fit(self, collection: Path, fit: FitState) -> None:
        """Keep where the training stands."""
        write_tensors(collection / FOLDER / f"{self.id}.safetensors", *fit)

    def saved_fit(self, collection: Path) -> FitState | None:
        """Where the training stood; None if it had not begun."""
        file = collection / FOLDER / f"{self.id}.safetensors"
        if not file.exists():
            return None
        tensors, facts = read_tensors(file)
        return dict(tensors), dict(facts)

    def forget(self, collection: Path) -> None:
        """Nothing more to go on with."""
        for ending in ("json", "safetensors"):
            (collection / FOLDER / f"{self.id}.{ending}").unlink(missing_ok=True)


def cut_short(collection: Path) -> list[Teaching]:
    """Teachings that an earlier process did not end."""
    found = []
    for file in sorted((collection / FOLDER).glob("*.json")):
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            teaching = Teaching(**raw, state="stopped", message="cut short; continue or cancel it")
            teaching.make_task()
        except (ValueError, TypeError, KeyError, TaskError):
            continue  # not ours, or damaged: it stays where it is
        found.append(teaching)
    return found
