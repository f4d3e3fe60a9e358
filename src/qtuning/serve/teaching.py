"""Teaching as a job: it reports, can be stopped and gone on with, and outlives the process that runs it.

In the collection's folder lie, for every teaching, what was uploaded (`ID.json`, from the moment it is accepted),
what is reported (`ID.status`), and where the training stands after every epoch (`ID.safetensors`). So other
processes that serve the collection see it too, and one whose process died is `stopped` and can be continued.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtuning.files import held, write_atomic
from qtuning.fit import FitState
from qtuning.lanes import Progress
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
    state: str = "waiting"
    """waiting, running, stopped, done or failed."""
    epoch: int = 0
    epochs: int = 0
    loss: float | None = None
    validation: float | None = None
    best: float | None = None
    message: str = ""
    result: dict[str, Any] | None = None
    folder: Path = field(default=Path(), repr=False)
    """Of the collection's teachings."""
    began: float = 0.0
    """When it was accepted."""
    owner: str = ""
    """The process that teaches it; see `Owner`."""

    @classmethod
    def of(cls, task: Task, replace: bool, collection: Path, owner: str) -> Teaching:
        """A new one, waiting; what was uploaded is on disk."""
        new = cls(secrets.token_hex(6), task.name, replace)
        new.folder, new.owner, new.began = collection / FOLDER, owner, time.time()
        names = ("texts", "labels", "label_names", "label_words", "metric", "splits")
        kept = {name: getattr(task, name) for name in names}
        write_atomic(new._file("json"), json.dumps(kept).encode())
        new.say()
        return new

    def make_task(self) -> Task:
        """The task that was uploaded."""
        kept = json.loads(self._file("json").read_bytes())
        texts = [tuple(t) if isinstance(t, list) else t for t in kept.pop("texts")]
        return Task(self.task, texts, **kept)

    def facts(self) -> dict[str, Any]:
        """What a client sees."""
        return {name: getattr(self, name) for name in SHOWN}

    def say(self, **news: Any) -> None:
        """Report, to other processes as well."""
        for name, value in news.items():
            setattr(self, name, value)
        status = {**self.facts(), "owner": self.owner, "replace": self.replace, "began": self.began}
        write_atomic(self._file("status"), json.dumps(status).encode())

    def after_epoch(self, now: Progress) -> None:
        """Report an epoch."""
        self.say(epoch=now.epoch, epochs=now.epochs, loss=now.loss,
                 validation=now.validation, best=now.best)  # fmt: skip

    # ── stopping ─────────────────────────────────────────────────────────────────────────────

    def ask_to_stop(self) -> None:
        """After the epoch under way, whichever process teaches it."""
        write_atomic(self._file("stop"), b"")

    @property
    def is_to_stop(self) -> bool:
        """Whether someone asked."""
        return self._file("stop").exists()

    def may_go_on(self) -> None:
        """Take back what `ask_to_stop` asked."""
        self._file("stop").unlink(missing_ok=True)

    # ── on disk ──────────────────────────────────────────────────────────────────────────────

    def save_fit(self, fit: FitState) -> None:
        """Keep where the training stands."""
        write_tensors(self._file("safetensors"), *fit)

    def saved_fit(self) -> FitState | None:
        """Where the training stood; None if it had not begun."""
        if not self._file("safetensors").exists():
            return None
        tensors, facts = read_tensors(self._file("safetensors"))
        return dict(tensors), dict(facts)

    def forget(self, with_report: bool = False) -> None:
        """Nothing more to go on with."""
        for ending in ("json", "safetensors", "stop", *(["status"] if with_report else [])):
            self._file(ending).unlink(missing_ok=True)

    def _file(self, ending: str) -> Path:
        return self.folder / f"{self.id}.{ending}"


class Owner:
    """This process, as long as it lives: a lock that others can try."""

    def __init__(self, collection: Path):
        self.name = secrets.token_hex(4)
        folder = collection / FOLDER
        folder.mkdir(exist_ok=True)
        with held(folder):  # no sweep between the file and its lock
            self._stream = (folder / f"{self.name}.owner").open("w")
            fcntl.flock(self._stream, fcntl.LOCK_EX)

    def leave(self) -> None:
        """No longer."""
        Path(self._stream.name).unlink(missing_ok=True)
        self._stream.close()


def is_alive(collection: Path, owner: str) -> bool:
    """Whether that process still holds its lock; any number may ask at once."""
    try:
        with (collection / FOLDER / f"{owner}.owner").open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def sweep_owners(collection: Path) -> None:
    """Remove what processes left that were killed."""
    with held(collection / FOLDER):
        for file in (collection / FOLDER).glob("*.owner"):
            if not is_alive(collection, file.stem):
                file.unlink(missing_ok=True)


def read_teachings(collection: Path) -> dict[str, Teaching]:
    """All that is reported of a collection's teachings, oldest first."""
    names = [file.stem for file in (collection / FOLDER).glob("*.status")]
    found = filter(None, (read_teaching(collection, name) for name in names))
    return {teaching.id: teaching for teaching in sorted(found, key=lambda t: (t.began, t.id))}


def read_teaching(collection: Path, name: str) -> Teaching | None:
    """What is reported of one of them; one whose process died is stopped."""
    folder = collection / FOLDER
    try:
        status = json.loads((folder / f"{name}.status").read_bytes()) if name.isalnum() else {}
        found = Teaching(name, status["task"], status["replace"])
        for key in (*SHOWN, "owner", "began"):
            setattr(found, key, status[key])
    except (OSError, ValueError, TypeError, KeyError):
        return None  # removed meanwhile, or not ours
    found.folder = folder
    if found.state not in ENDED and not is_alive(collection, found.owner):
        found.state, found.message = "stopped", "its process ended; it can be continued"
    return found
