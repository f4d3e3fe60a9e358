"""Run folders: what a run was told, what happened, where it stands, what came out.

    runs/<stream>/<method>/<seed>-<hash>/
      config.yaml                 resolved; the hash is of this
      events.jsonl                one line per checkpoint, mostly of an epoch, and per task
      state/<n>.safetensors       what continuing needs
      tasks/<name>.safetensors    snapshot, scores and raw prompt of each finished task
      weights/<name>.safetensors  the task's whole model, of a method that keeps one
      result.json                 when it is finished
    runs/<stream>/<method>/pack-<hash>.json   which n is committed, for all runs of the pack at once (of several
                                              streams: with the first)

Every file is written aside, flushed and renamed. Replacing the pack's file is the only commit: a kill at any moment
leaves the last commit, and the same command goes on from there with the same bits.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import math
import os
import resource
import shutil
import warnings
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from qtuning.data import fingerprint
from qtuning.errors import RecordError
from qtuning.files import sha256_of, write_atomic
from qtuning.fit import FitState
from qtuning.snapshots import Snapshot
from qtuning.stream_loop import Journal, StreamRun
from qtuning.tensors import part

SCHEMA = 1


class DiskSnapshots(dict[str, Snapshot]):
    """Snapshots that lie in a run's folder and are read when asked for: memory does not grow with tasks."""

    def __init__(
        self, folder: Path, names: Sequence[str], fresh: Mapping[str, Snapshot] | None = None
    ):
        super().__init__(fresh or {})
        self.folder, self.names = folder, tuple(names)

    def __missing__(self, name: str) -> Snapshot:
        if name not in self.names:
            raise KeyError(name)
        tensors, facts = read_tensors(self.folder / f"{name}.safetensors")
        snapshot = Snapshot.from_tensors(facts["card"], tensors, facts["facts"])
        weights = _weights_file(self.folder, name)
        return replace(snapshot, weights=DiskWeights(weights)) if weights.exists() else snapshot

    def copy(self) -> DiskSnapshots:
        """The same, to which a new snapshot can be added."""
        fresh = {name: dict.__getitem__(self, name) for name in dict.keys(self)}
        return DiskSnapshots(self.folder, self.names, fresh)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.names, *dict.keys(self))))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def keys(self) -> Any:
        """Names in the order of learning."""
        return KeysView(self)

    def values(self) -> Any:
        """Read one by one."""
        return ValuesView(self)

    def items(self) -> Any:
        """Read one by one."""
        return ItemsView(self)


class DiskWeights(Mapping[str, Tensor]):
    """A model's weights that lie in a run's folder, read when the first of them is asked for: most ask for none."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.path)[0]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        with safe_open(self.path, framework="pt") as stream:
            return len(stream.keys())


def _weights_file(tasks: Path, name: str) -> Path:
    """Beside the folder of tasks, because these are read often and weights are large."""
    return tasks.parent / "weights" / f"{name}.safetensors"


def pack_file(folders: Sequence[Path], tasks: int, homes: Sequence[Path]) -> Path:
    """Where the runs of these folders commit together; `homes` are all folders in which their pack may have begun.

    A pack that was killed between the results of two runs has learnt everything: the runs whose results are missing
    belong to it still, and take theirs from its last commit rather than learn again in other company.
    """
    names = [folder.name for folder in folders]
    own = folders[0].parent / f"pack-{sha256_of('-'.join(names).encode())[:8]}.json"
    begun = sorted({file for home in homes for file in home.glob("pack-*.json")})
    for file in [] if own.exists() else begun:
        committed = read_json(file)
        if set(names) < set(committed["runs"]) and committed.get("done") == tasks:
            return file
    return own


class RunJournal(Journal):
    """Keeps a pack's progress in the folders of its runs."""

    def __init__(self, methods: Sequence[Any], folders: Sequence[Path], pack: Path):
        self.methods, self.folders, self.pack = list(methods), list(folders), pack
        self.generation = 0
        self._rows: list[dict[str, str]] = []
        """The fingerprint of every task's rows, of each run in the order of its stream."""
        self._noted: dict[Path, tuple[int, int]] = {}
        """Tasks done and epoch of each run's latest event."""

    # ── going on ─────────────────────────────────────────────────────────────────────────────

    def resume(self, runs: Sequence[StreamRun]) -> list[FitState] | None:
        """Put the runs where the last commit left them, unless some of them were begun anew in other company since."""
        self._rows = [
            {name: fingerprint(split) for name, split in run.splits.items()} for run in runs
        ]
        if not self.pack.exists():
            self._begin("were begun in other company")
            return None
        self.generation = int(read_json(self.pack)["generation"])
        files = [folder / "state" / f"{self.generation}.safetensors" for folder in self.folders]
        states = [read_tensors(file) for file in files if file.exists()]
        if [facts.get("pack") for _, facts in states] != [self.pack.name] * len(files):
            gone = [folder.name for folder in self.folders if not (folder / "state").exists()]
            if gone:
                self._begin(
                    f"go on no more: the folders of others ({', '.join(gone)}) were removed"
                )
            else:
                self._begin("were begun again in other company since")
            return None
        for folder, now, (_, facts) in zip(self.folders, self._rows, states, strict=True):
            if [*facts.get("rows", now).items()] != [*now.items()]:
                raise RecordError(
                    f"{folder} was begun with other tasks or texts than its stream has now; put them back, or remove "
                    f"the folder to begin again."
                )
        fits: list[FitState] = []
        for run, folder, method, (tensors, facts) in zip(
            runs, self.folders, self.methods, states, strict=True
        ):
            self._noted[folder] = (facts["done"], (facts["fit"] or {}).get("epoch", 0))
            _truncate(folder / "events.jsonl", facts["events"], folder)
            run.done, run.seconds, run.parts = facts["done"], facts["seconds"], facts["parts"]
            run.matrix, run.sampled = _from_json(facts["matrix"]), _from_json(facts["sampled"])
            run.unchanged, run.found = facts["unchanged"], facts["found"]
            snapshots = DiskSnapshots(folder / "tasks", run.tasks[: run.done])
            run.state = method.unpack(part(tensors, "method"), facts["method"], snapshots)
            run.when_learnt = _Scores(folder / "tasks", run.tasks[: run.done])
            if facts["fit"] is not None:
                fits.append((part(tensors, "fit"), facts["fit"]))
        return fits or None

    def _begin(self, why: str) -> None:
        """Take the folders: whatever another pack had begun in them is void, and that is said."""
        begun = sum((folder / "state").exists() for folder in self.folders)
        if begun:
            warnings.warn(
                f"{begun} of the {len(self.folders)} runs of {self.pack} {why}: all begin anew.",
                stacklevel=3,
            )
        for folder in self.folders:
            (folder / "events.jsonl").unlink(missing_ok=True)
            shutil.rmtree(folder / "state", ignore_errors=True)

    # ── committing ───────────────────────────────────────────────────────────────────────────

    def epoch(self, runs: Sequence[StreamRun], fits: list[FitState]) -> None:
        """Commit all lanes in the middle of a task."""
        for run, folder, (_, facts) in zip(runs, self.folders, fits, strict=True):
            if self._noted.get(folder) == (run.done, facts["epoch"]):
                continue  # another lane ended an epoch, this one did not
            self._noted[folder] = (run.done, facts["epoch"])
            seen = {
                "task": run.tasks[run.done],
                "epoch": facts["epoch"],
                "validation": facts["latest"],
            }
            _append(folder / "events.jsonl", {"event": "epoch", **seen})
        self._commit(runs, fits)

    def task(self, runs: Sequence[StreamRun]) -> None:
        """Put the finished tasks on disk, take them out of memory, commit."""
        for run, folder in zip(runs, self.folders, strict=True):
            _put_on_disk(run, folder)
        used = memory()  # of the process, so once for all runs
        for run, folder in zip(runs, self.folders, strict=True):
            task = run.tasks[run.done - 1]
            [[score]] = to_json(run.matrix[run.done : run.done + 1, run.done - 1 : run.done])
            event = {"event": "task", "task": task, "score": score, "seconds": run.seconds[task]}
            _append(folder / "events.jsonl", {**event, **used})
        self._commit(runs, None)

    def _commit(self, runs: Sequence[StreamRun], fits: list[FitState] | None) -> None:
        number = self.generation + 1
        for i, (run, folder) in enumerate(zip(runs, self.folders, strict=True)):
            own, facts = self.methods[i].pack(run.state)
            tensors = {f"method.{key}": tensor for key, tensor in own.items()}
            if fits is not None:
                tensors |= {f"fit.{key}": tensor for key, tensor in fits[i][0].items()}
            recorded = {
                "pack": self.pack.name,
                "rows": self._rows[i],
                "done": run.done,
                "seconds": run.seconds,
                "parts": run.parts,
                "unchanged": run.unchanged,
                "found": run.found,
                "matrix": to_json(run.matrix),
                "sampled": to_json(run.sampled),
                "method": facts,
                "fit": None if fits is None else fits[i][1],
                "events": _settled(folder / "events.jsonl"),
            }
            write_tensors(folder / "state" / f"{number}.safetensors", tensors, recorded)
        names, done = [folder.name for folder in self.folders], runs[0].done
        write_json(self.pack, {"generation": number, "done": done, "runs": names})
        self.generation = number
        for folder in self.folders:
            for old in (folder / "state").iterdir():
                if old.name != f"{number}.safetensors":
                    old.unlink(missing_ok=True)


def _put_on_disk(run: StreamRun, folder: Path) -> None:
    """The latest task's snapshot and scores, which are read from there from now on."""
    task = run.tasks[run.done - 1]
    snapshot = run.state.snapshots[task]
    if snapshot.weights:
        write_tensors(_weights_file(folder / "tasks", task), snapshot.weights, {})
    light = replace(snapshot, weights={})
    tensors = {**light.tensors(), "scores": run.when_learnt[task]}
    if hasattr(run.state, "queue"):
        queue = run.state.queue
        tensors |= {
            "queue": queue.rows,
            "prompt": queue.rows[-queue.prompt_length :].clone(),
        }
    facts = {"card": asdict(snapshot.card), "facts": dict(snapshot.facts)}
    write_tensors(folder / "tasks" / f"{task}.safetensors", tensors, facts)
    names = run.tasks[: run.done]
    run.state = replace(run.state, snapshots=DiskSnapshots(folder / "tasks", names))
    run.when_learnt = _Scores(folder / "tasks", names)


class _Scores(dict[str, Tensor]):
    """Log-probabilities of finished tasks, read from the run's folder when asked for."""

    def __init__(self, folder: Path, names: Sequence[str]):
        super().__init__()
        self.folder, self.names = folder, tuple(names)

    def __missing__(self, name: str) -> Tensor:
        return read_tensors(self.folder / f"{name}.safetensors")[0]["scores"]


# ── files ────────────────────────────────────────────────────────────────────────────────────


def task_costs(folder: Path) -> list[dict[str, Any]]:
    """Time and memory after each task that a run has behind it, from its events."""
    file = folder / "events.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "task"]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """One file that holds tensors and JSON, replaced as a whole, with a hash of its own content."""
    kept = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    text = json.dumps(facts)
    digest = sha256_of(
        text.encode() + b"".join(kept[key].numpy().tobytes() for key in sorted(kept))
    )
    # one key only: safetensors writes several in random order, and equal content must be equal bytes
    record = json.dumps({"sha256": digest, "facts": text})
    write_file(path, save_tensors(kept, metadata={"record": record}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` wrote; a damaged file is refused."""
    try:
        with safe_open(path, framework="pt") as stream:
            about = json.loads(stream.metadata()["record"])
            tensors = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118
        text = about["facts"]
        content = text.encode() + b"".join(tensors[k].numpy().tobytes() for k in sorted(tensors))
        if sha256_of(content) != about["sha256"]:
            raise ValueError("its content has changed")
        return tensors, json.loads(text)
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise RecordError(
            f"{path} is damaged or missing ({error}); remove the folder {path.parent.parent}: its pack begins anew."
        ) from error


def write_json(path: Path, value: Any) -> None:
    """A JSON file, replaced as a whole."""
    write_file(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    """A JSON file; a damaged one is refused."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} is damaged ({error}); remove it to begin again.") from error


def write_file(path: Path, data: bytes) -> None:
    """Bytes, replaced as a whole; what goes wrong is said in one line."""
    try:
        write_atomic(path, data)
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror}. What was finished is kept; mend that and run the same "
            f"command again."
        ) from error


def _append(path: Path, event: Mapping[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(event) + "\n")
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}.") from error


def _settled(path: Path) -> int:
    """Bytes of a log, all of them on disk: a commit must not outlast what it counts on."""
    with path.open("a") as stream:
        os.fsync(stream.fileno())
        return os.fstat(stream.fileno()).st_size


def _truncate(path: Path, size: int, folder: Path) -> None:
    """Drop events after the last commit: they will happen again."""
    with path.open("a") as stream:
        if os.fstat(stream.fileno()).st_size < size:
            raise RecordError(
                f"{path} is shorter than at the last commit; put it back, or remove the folder {folder}: its pack "
                f"begins anew."
            )
        stream.truncate(size)


def to_json(matrix: Any) -> list[list[float | None]]:
    """A matrix with None for nan."""
    rows = np.asarray(matrix, dtype=np.float64).tolist()  # numpy's own numbers are slow to look at
    return [[None if math.isnan(x) else x for x in row] for row in rows]


def _from_json(rows: Sequence[Sequence[float | None]]) -> Any:
    return np.array([[np.nan if x is None else x for x in row] for row in rows], dtype=np.float64)


# ── one process per run ──────────────────────────────────────────────────────────────────────


@contextmanager
def locked(folders: Sequence[Path]) -> Iterator[None]:
    """Hold the runs' folders; a second process is told so and stops."""
    with ExitStack() as stack:
        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stream = stack.enter_context((folder / ".lock").open("w"))
            except OSError as error:
                raise RecordError(
                    f"cannot write to {folder}: {error.strerror}; choose another folder."
                ) from error
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RecordError(
                    f"another process is running {folder}; wait for it, or choose another output folder."
                ) from None
        yield


def memory() -> dict[str, int]:
    """Bytes of all tensors alive, or where cards are used of those on cards, which torch counts; of the process."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cards = range(torch.cuda.device_count())
        live = {"card_bytes": sum(torch.cuda.memory_allocated(card) for card in cards)}
    else:
        live = {"live_tensor_bytes": _live_tensors()}
    return {**live, "resident_bytes": _resident()}


def _live_tensors() -> int:
    """Bytes of tensors, found among all objects."""
    gc.collect()
    storages: dict[int, int] = {}
    is_tensor: dict[type, bool] = {}  # asking a class once is what makes this quick
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would wake lazy modules
        if kind not in is_tensor:
            # what compiling traced with has no memory, and warns when asked for it
            is_tensor[kind] = issubclass(kind, torch.Tensor) and kind.__name__ != "FakeTensor"
        if is_tensor[kind]:
            with contextlib.suppress(RuntimeError):  # as other kinds of tensor may have none
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _resident() -> int:
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
