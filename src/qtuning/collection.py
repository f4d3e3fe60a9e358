"""The saved artefact: snapshots, queue and shared prefix in one folder, safetensors and JSON only.

    manifest.json                  format version, backbone, sha256 of every file below
    state-<sha>.safetensors        what the next task needs: queue, shared prefix, its MLP
    tasks/<name>/task.json         labels, label words, scores
    tasks/<name>/snapshot.safetensors
    README.md                      a model card, for people

Replacing the manifest is the only commit. Files it names are never written again: a new version of
a task goes to `tasks/<name>@2/`, and what no manifest names any more is removed afterwards.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from qtuning import __version__
from qtuning.backbones.sources import hub_id
from qtuning.cards import render_card
from qtuning.errors import CollectionError, QTuningError, TaskError
from qtuning.files import held, sha256_of, write_atomic
from qtuning.snapshots import Snapshot
from qtuning.tasks import check_task_name

FORMAT = 1
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""How to read an older manifest: from format n to n + 1."""
MANIFEST = "manifest.json"
OURS = re.compile(r"tasks|teaching|state-\w+\.safetensors|manifest\.json|README\.md|\..*")
"""Names a collection may leave in its folder, also when its first save was cut short."""
CUT_SHORT = re.compile(
    r"\.(manifest\.json|README\.md|task\.json|(state-\w+|snapshot)\.safetensors)\.[a-z0-9_]{8}"
)
"""Names under which `write_atomic` leaves our files when it is killed; other dot files are the user's."""
TRIES = 10
"""To read or change a collection that others are changing."""
BACKBONE_KEYS = ("name", "family", "fingerprint", "dtype", "readout", "max_length")


@dataclass(frozen=True)
class Collection:
    """Everything a folder holds, in memory."""

    backbone: dict[str, Any]
    """name, family, fingerprint, dtype, readout, max_length."""
    method: str
    settings: dict[str, Any]
    seed: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    """What else the method's state needs, JSON only."""
    snapshots: dict[str, Snapshot]
    versions: dict[str, int] = field(default_factory=dict)


def write_collection(
    folder: Path, collection: Collection, expected: str | None = None
) -> tuple[str, dict[str, int]]:
    """Save; returns the manifest's sha256, by which a later save knows that nothing came between, and task versions.

    Args:
        folder: New, empty, or holding a collection.
        collection: What to save.
        expected: sha256 of the manifest this collection came from; `""` overwrites whatever is there.
    """
    check_target(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        return _write(folder, collection, expected)


def _write(
    folder: Path, collection: Collection, expected: str | None
) -> tuple[str, dict[str, int]]:
    old = _manifest_bytes(folder)
    if old is not None and expected != "" and sha256_of(old) != expected:
        raise CollectionError(
            f"{folder} already holds a collection, or was changed since it was opened; nothing was written. "
            f"Choose another folder, or pass overwrite=True."
        )
    tasks = {
        name: _write_task(folder, name, snapshot, collection.versions.get(name, 1))
        for name, snapshot in collection.snapshots.items()
    }
    state = save_tensors({key: tensor.contiguous() for key, tensor in collection.tensors.items()})
    state_name = f"state-{sha256_of(state)[:16]}.safetensors"
    _write_once(folder / state_name, state)
    manifest = {
        "format": FORMAT,
        "qtuning": __version__,
        "backbone": collection.backbone,
        "method": collection.method,
        "settings": collection.settings,
        "seed": collection.seed,
        "state": {"file": state_name, "sha256": sha256_of(state), "facts": collection.facts},
        "tasks": tasks,
    }
    data = _json_bytes(manifest)
    write_atomic(folder / MANIFEST, data)  # the one commit
    _remove_unnamed(folder, manifest)
    card = render_card(
        "model_card.md.j2", collection=collection, hub_id=hub_id(collection.backbone["name"])
    )
    write_atomic(folder / "README.md", card.encode())
    return sha256_of(data), {name: entry["version"] for name, entry in tasks.items()}


def check_target(folder: Path) -> None:
    """Refuse to save where something else lies; to be asked before the work, not only after it."""
    if folder.exists() and not folder.is_dir():
        raise CollectionError(f"{folder} is a file; choose another folder.")
    others = [path.name for path in folder.glob("*") if not OURS.fullmatch(path.name)]
    manifest = _manifest_bytes(folder)
    if manifest is None and others:
        raise CollectionError(
            f"{folder} is not empty and holds no collection ({others[0]}); choose another folder."
        )
    if manifest is not None and b'"qtuning"' not in manifest:
        raise CollectionError(
            f"{folder} has a manifest.json of something else; choose another folder."
        )


def read_collection(folder: Path) -> tuple[Collection, str]:
    """A collection whose every file is whole, and its manifest's sha256.

    Others may be saving it: files can go while it is read, and then there is a newer one.
    """
    for _ in range(TRIES):
        before = manifest_sha(folder)
        try:
            return _read(folder)
        except CollectionError:
            if manifest_sha(folder) == before:
                raise
    return _read(folder)


def _read(folder: Path) -> tuple[Collection, str]:
    data = _manifest_bytes(folder)
    if data is None:
        raise CollectionError(
            f"{folder} holds no collection (no {MANIFEST}); make one with qtuning learn."
        )
    manifest = _parse_manifest(folder, data)
    with damage_named(folder):
        state = manifest["state"]
        tensors = load_tensors(_checked(folder, state["file"], state["sha256"]))
        snapshots = {
            name: _read_task(folder, name, entry) for name, entry in manifest["tasks"].items()
        }
        found = Collection(
            backbone={key: manifest["backbone"][key] for key in BACKBONE_KEYS},
            method=manifest["method"],
            settings=dict(manifest["settings"].items()),
            seed=manifest["seed"],
            tensors=tensors,
            facts=state["facts"],
            snapshots=snapshots,
            versions={name: entry["version"] for name, entry in manifest["tasks"].items()},
        )
    return found, sha256_of(data)


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Turn what a manifest with missing or odd entries causes into one error that says so."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, SafetensorError) as error:
        if isinstance(error, QTuningError):
            raise
        raise CollectionError(
            f"{folder / MANIFEST} is damaged ({type(error).__name__}: {error}); restore it from a copy."
        ) from error


def _parse_manifest(folder: Path, data: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(data)
        version = manifest["format"]
    except (ValueError, KeyError, TypeError):
        raise CollectionError(
            f"{folder / MANIFEST} is damaged (not a manifest); restore it from a copy."
        ) from None
    if not isinstance(version, int) or version > FORMAT:
        raise CollectionError(
            f"{folder} has format {version!r}, newer than {FORMAT}, which this version reads; upgrade qtuning."
        )
    while version < FORMAT:
        if version not in UPGRADES:
            raise CollectionError(
                f"{folder} has format {version}, which no version of qtuning wrote; restore it from a copy."
            )
        manifest = UPGRADES[version](manifest)
        version += 1
    return dict(manifest)


def _write_task(folder: Path, name: str, snapshot: Snapshot, version: int) -> dict[str, Any]:
    check_task_name(name)
    files = {
        "task.json": _json_bytes({**asdict(snapshot.card), "facts": dict(snapshot.facts)}),
        "snapshot.safetensors": save_tensors(
            {key: t.contiguous() for key, t in snapshot.tensors().items()}
        ),
    }
    place = f"tasks/{name}" if version == 1 else f"tasks/{name}@{version}"
    while any(_differs(folder / place / file, data) for file, data in files.items()):
        version += 1  # the name is taken by other bytes, which the old manifest may still name
        place = f"tasks/{name}@{version}"
    for file, data in files.items():
        _write_once(folder / place / file, data)
    return {
        "version": version,
        "folder": place,
        "files": {file: sha256_of(data) for file, data in files.items()},
    }


def _read_task(folder: Path, name: str, entry: dict[str, Any]) -> Snapshot:
    try:
        check_task_name(name)
    except TaskError as error:
        raise CollectionError(f"{folder / MANIFEST} is damaged: {error}") from None
    place = entry["folder"]
    if not re.fullmatch(rf"tasks/{re.escape(name)}(@\d+)?", place):
        raise CollectionError(
            f"{folder / MANIFEST} puts task {name!r} at {place!r}, outside its place; restore it from a copy."
        )
    read = {file: _checked(folder, f"{place}/{file}", sha) for file, sha in entry["files"].items()}
    card = json.loads(read["task.json"])
    facts = card.pop("facts")
    tensors = load_tensors(read["snapshot.safetensors"])
    return Snapshot.from_tensors(card, tensors, facts)


def _checked(folder: Path, name: str, expected: str) -> bytes:
    path = folder / name
    # by name alone: in a hub cache the files are links to a folder beside, and sha256 guards them
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise CollectionError(
            f"{folder / MANIFEST} names {name!r}, outside the collection; restore it from a copy."
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CollectionError(
            f"{path} cannot be read ({error.strerror}); restore it from a copy."
        ) from None
    if sha256_of(data) != expected:
        raise CollectionError(
            f"{path} is damaged (its sha256 is not the manifest's); restore it from a copy."
        )
    return data


def manifest_sha(folder: Path) -> str:
    """By which one sees that a collection was changed; empty where there is none."""
    data = _manifest_bytes(folder)
    return sha256_of(data) if data is not None else ""


def _manifest_bytes(folder: Path) -> bytes | None:
    path = folder / MANIFEST
    return path.read_bytes() if path.is_file() else None


def _differs(path: Path, data: bytes) -> bool:
    return path.exists() and path.read_bytes() != data


def _write_once(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        write_atomic(path, data)


def _remove_unnamed(folder: Path, manifest: dict[str, Any]) -> None:
    """What no manifest names: earlier states, removed or replaced tasks, leftovers of a kill."""
    for state in folder.glob("state-*.safetensors"):
        if state.name != manifest["state"]["file"]:
            state.unlink(missing_ok=True)
    named = {entry["folder"] for entry in manifest["tasks"].values()}
    for place in folder.glob("tasks/*"):
        if f"tasks/{place.name}" not in named:
            shutil.rmtree(place, ignore_errors=True)
    for hidden in [*folder.glob(".*"), *folder.glob("tasks/*/.*")]:
        if CUT_SHORT.fullmatch(hidden.name) and hidden.is_file():
            hidden.unlink(missing_ok=True)


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
