"""A run from its config to its record: `run(config)` can be called again and goes on where it stood."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml
from torch import Tensor

from qtuning import __version__
from qtuning.backbones import DTYPES, READOUTS, Backbone, load_backbone
from qtuning.config import MethodSettings, TrainSettings, make_settings, settings_dict
from qtuning.data import fingerprint, load_stream, load_task
from qtuning.errors import ConfigError, RecordError, unknown
from qtuning.evaluation import (
    average_score,
    average_so_far,
    backward_transfer,
    forgetting,
    forward_transfer,
    majority_share,
)
from qtuning.files import sha256_of
from qtuning.lanes import Report
from qtuning.methods import get_method, make_method
from qtuning.presets import get_preset
from qtuning.protocols import PROTOCOLS, make_split
from qtuning.queue import shares_kept
from qtuning.records import (
    SCHEMA,
    RunJournal,
    locked,
    pack_file,
    read_json,
    read_tensors,
    task_costs,
    to_json,
    write_file,
    write_json,
)
from qtuning.snapshots import EVALUATE_WITH
from qtuning.stream_loop import INNER_CELL_ROWS, Course, StreamRun, run_streams
from qtuning.streams import get_stream, is_file_name
from qtuning.tasks import Task

Loaded = dict[str, Backbone]
"""The model of the latest pack, by all that it was loaded with."""
Started = Callable[[Backbone, Sequence[StreamRun]], None]
"""Told of the model and the unfinished runs as they stand, before anything more is learnt."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's result, but its seed."""

    stream: str
    method: str = "q-tuning"
    model: str = "minilm"
    protocol: str = ""
    """`given`, `progprompt`, `paper` or `tuning`; by default the stream's: progprompt for the paper's."""
    dtype: str = "fp32"
    readout: str = "mean"
    max_length: int | None = None
    test_limit: int = 250
    """Test rows per class at most; 0 takes all."""
    inner_rows: int = INNER_CELL_ROWS
    """Test rows of a task each time it is asked between its learning and the end; with 0 it is not asked in between."""
    evaluate_with: str = "snapshot"
    preset: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def resolved(self) -> RunConfig:
        """With every default filled in and every name checked; no model is loaded for it."""
        self._check_kinds()
        stream = get_stream(self.stream)
        protocol = self.protocol or stream.protocol
        if protocol not in PROTOCOLS:
            raise ConfigError(unknown("protocol", protocol, PROTOCOLS))
        get_method(self.method)
        for name in sorted({f.name for f in fields(RunConfig)} & self.settings.keys()):
            raise ConfigError(
                f"{name} is no setting of the method but belongs to the run: give it beside 'settings' in a YAML, or "
                f"to qtuning run as --{name.replace('_', '-')}, not with --set."
            )
        if self.evaluate_with not in EVALUATE_WITH:
            raise ConfigError(unknown("evaluation mode", self.evaluate_with, EVALUATE_WITH))
        given = {**(get_preset(self.preset, self.method) if self.preset else {}), **self.settings}
        make_settings(**given)
        return RunConfig(**{**asdict(self), "protocol": protocol, "settings": given})

    def _check_kinds(self) -> None:
        """Refuse values of a wrong kind, as a YAML may hold them."""
        for name, wish, is_right in (
            ("stream", "a name or a file", isinstance(self.stream, str)),
            ("method", "a name", isinstance(self.method, str)),
            ("model", "a name or a folder", isinstance(self.model, str)),
            ("settings", "a mapping of settings to values", isinstance(self.settings, Mapping)),
            ("test_limit", "a whole number, or 0 for all", _is_count(self.test_limit)),
            ("inner_rows", "a whole number, or 0 for none", _is_count(self.inner_rows)),
            ("max_length", "a whole number", _is_count(self.max_length or 0)),
        ):
            if not is_right:
                raise ConfigError(f"{name} must be {wish}, got {getattr(self, name)!r}.")
        for name, known in (("dtype", DTYPES), ("readout", READOUTS)):
            if getattr(self, name) not in known:
                raise ConfigError(unknown(name, str(getattr(self, name)), known))

    def short_hash(self) -> str:
        """Eight hex digits that name this config."""
        return sha256_of(json.dumps(asdict(self), sort_keys=True).encode())[:8]


def read_run_config(raw: dict[str, Any], source: str) -> RunConfig:
    """A config from a YAML's mapping; unknown keys suggest the nearest."""
    known = [f.name for f in fields(RunConfig)]
    for key in raw:
        if key not in known:
            raise ConfigError(f"{source}: {unknown('key', str(key), known)}")
    if "stream" not in raw:
        raise ConfigError(
            f"{source}: the key 'stream' is missing; name one that `qtuning ls streams` prints."
        )
    return RunConfig(**numbered(raw))


def numbered(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A YAML's mapping with `test_limit: all` as the number that means it."""
    return {
        key: 0 if (key, value) == ("test_limit", "all") else value for key, value in raw.items()
    }


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def run_folder(root: Path, config: RunConfig, seed: int) -> Path:
    """Where a run's record lies."""
    stream = Path(config.stream).stem
    return root / stream / config.method / f"{seed}-{config.short_hash()}"


def run(
    config: RunConfig, seeds: Sequence[int], root: Path, **options: Any
) -> list[dict[str, Any]]:
    """Run the seeds that are not finished, together; answer at once with the records of those that are.

    `options` are those of `run_together`.
    """
    return run_together([(config, seed) for seed in seeds], root, **options)


def run_together(
    wanted: Sequence[tuple[RunConfig, int]],
    root: Path,
    *,
    data: str | None = None,
    device: str | None = None,
    compile: str = "auto",
    lanes: int | None = None,
    report: Report | None = None,
    after_task: Callable[[Task, Sequence[StreamRun]], None] | None = None,
    started: Started | None = None,
    loaded: Loaded | None = None,
) -> list[dict[str, Any]]:
    """Configs with a seed each that can share a pack, all as its lanes; their records in the same order.

    They may differ in stream, method and settings; see `check_company`.

    `device`, `compile` and `lanes` say how a run is computed, not what it is: see `load_backbone`. With `loaded` the
    model is kept there for the next call, compiled layers included.
    """
    wanted = [(config.resolved(), seed) for config, seed in wanted]
    check_company([config for config, _ in wanted])
    how = {"device": device, "compile": compile, "lanes": lanes}
    folders = [run_folder(root, config, seed) for config, seed in wanted]

    def unfinished() -> list[int]:
        return [i for i, folder in enumerate(folders) if not (folder / "result.json").exists()]

    for i in {*range(len(folders))} - {*unfinished()}:
        _check_unchanged(folders[i], *wanted[i])
    if todo := unfinished():
        with locked([folders[i] for i in todo]):
            if todo := unfinished():
                own = [folders[i] for i in todo]
                tasks = len(get_stream(wanted[0][0].stream).tasks)
                pack = pack_file(own, tasks, [folder.parent for folder in folders])
                missing = [wanted[i] for i in todo]
                kept = {} if loaded is None else loaded
                _run_pack(missing, own, pack, data, how, kept, report, after_task, started)
    return [read_json(folder / "result.json") for folder in folders]


def check_company(configs: Sequence[RunConfig]) -> None:
    """Refuse configs that cannot share a pack."""
    if len({company_of(config) for config in configs}) > 1:
        raise ConfigError(
            "runs share a pack if they differ in stream, method, preset and settings alone, their methods learn in "
            "packs, and their streams have equally many tasks."
        )


def company_of(config: RunConfig) -> str:
    """Equal for resolved configs that can share a pack."""
    common = replace(config, stream="", preset="", method="", settings={})
    if not get_method(config.method).packable:
        common = replace(config, stream="")
    return f"{len(get_stream(config.stream).tasks)} tasks, {common.short_hash()}"


def prepare(
    config: RunConfig, data: str | None, how: Mapping[str, Any], loaded: Loaded
) -> tuple[list[Task], Backbone, Any, tuple[MethodSettings, TrainSettings]]:
    """What a resolved config needs to run: the tasks with their texts, the model, the method on it, its settings."""
    tasks = load_stream(get_stream(config.stream), data)
    about = {
        "name": config.model,
        "dtype": config.dtype,
        "readout": config.readout,
        "max_length": config.max_length,
        **how,
    }
    key = json.dumps(about, sort_keys=True)
    if key not in loaded:
        loaded.clear()  # one at a time: models are large
        loaded[key] = load_backbone(**about)
    backbone = loaded[key]
    settings = make_settings(backbone.family, **config.settings)
    return tasks, backbone, make_method(config.method, backbone, *settings), settings


def _run_pack(
    wanted: Sequence[tuple[RunConfig, int]],
    folders: Sequence[Path],
    pack: Path,
    data: str | None,
    how: Mapping[str, Any],
    loaded: Loaded,
    report: Report | None,
    after_task: Callable[[Task, Sequence[StreamRun]], None] | None,
    started: Started | None,
) -> None:
    config = wanted[0][0]
    for folder, (own, seed) in zip(folders, wanted, strict=True):
        _check_config(folder, own, seed)
    tasks, backbone, method, settings = prepare(config, data, how, loaded)
    streams = {config.stream: tasks}
    made = {config.short_hash(): (method, settings)}
    for other, _ in wanted:
        if other.stream not in streams:
            streams[other.stream] = load_stream(get_stream(other.stream), data)
        if other.short_hash() not in made:
            its = make_settings(backbone.family, **other.settings)
            made[other.short_hash()] = make_method(other.method, backbone, *its), its
    began = datetime.now(UTC)
    is_mixed = len({own.short_hash() for own, _ in wanted}) > 1
    courses = []
    for own, seed in wanted:
        method, settings = made[own.short_hash()]
        label = f"{own.method} {own.short_hash()}" if is_mixed else ""
        courses.append(Course(method, streams[own.stream], seed, settings[1], label))

    def begin(runs: Sequence[StreamRun]) -> None:
        for folder, (own, seed) in zip(folders, wanted, strict=True):
            write_file(folder / "config.yaml", _config_text(own, seed).encode())
        if started:
            started(backbone, runs)

    runs = run_streams(
        backbone,
        courses,
        protocol=config.protocol,
        test_limit=config.test_limit,
        evaluate_with=config.evaluate_with,
        inner_rows=config.inner_rows,
        report=report,
        after_task=after_task,
        started=begin,  # what cannot begin leaves no unfinished run
        journal=RunJournal([course.method for course in courses], folders, pack),
    )
    for stream_run, folder, (own, _) in zip(runs, folders, wanted, strict=True):
        stored = {
            name: read_tensors(folder / "tasks" / f"{name}.safetensors")
            for name in stream_run.tasks
        }
        method, settings = made[own.short_hash()]
        flat = settings_dict(getattr(method, "settings", settings[0]), settings[1])
        facts = result_of(own, stream_run, backbone, flat, stored, task_costs(folder), began)
        write_json(folder / "result.json", facts)


def _config_text(config: RunConfig, seed: int) -> str:
    return yaml.safe_dump({**asdict(config), "seed": seed}, sort_keys=False)


def _check_config(folder: Path, config: RunConfig, seed: int) -> None:
    """Refuse a folder whose config is not this one."""
    file = folder / "config.yaml"
    if file.exists() and file.read_text(encoding="utf-8") != _config_text(config, seed):
        raise RecordError(
            f"{file} was changed since the run began; put it back, or remove the folder {folder} to begin again."
        )


def _check_unchanged(folder: Path, config: RunConfig, seed: int) -> None:
    """Refuse the record of a stream whose tasks, or whose tables of the user's, are others now."""
    record = read_json(folder / "result.json")
    then = {name: facts["fingerprint"] for name, facts in record["tasks"].items()}
    now = {}
    for name in get_stream(config.stream).tasks:
        if not is_file_name(name):
            now[name] = then.get(name)
        elif not Path(name).exists():  # gone, but what was learnt of it stands
            now[Path(name).stem] = then.get(Path(name).stem)
        else:
            task, own = load_task(name), record["settings"]
            shots, limit = own["shots"], own["validation_limit"]
            split = make_split(config.protocol, task, shots, seed, limit, config.test_limit)
            now[task.name] = fingerprint(split)
    if list(now.items()) != list(then.items()):
        raise RecordError(
            f"{folder} is the record of other tasks or texts than {config.stream!r} has now; remove it, or choose "
            f"another output folder."
        )


def result_of(
    config: RunConfig,
    run: StreamRun,
    backbone: Backbone,
    settings: dict[str, Any],
    stored: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, Any]]],
    costs: list[dict[str, Any]],
    began: datetime,
) -> dict[str, Any]:
    """The record of a finished run; `docs/reference.md` describes each key.

    `stored` holds, for each task, its tensors (rows, queue, prompt) and the facts of its snapshot.
    """
    matrix = run.matrix
    tasks = {}
    for j, name in enumerate(run.tasks):
        tensors, facts = stored[name][0], stored[name][1]["facts"]
        tasks[name] = {
            "score": matrix[-1, j],
            "when_learnt": _known(matrix[j + 1, j]),
            "metrics": run.parts[name],
            "best_validation": facts.get("validation_score"),
            "majority": majority_share(run.splits[name].test.labels),
            "split": run.splits[name].sizes,
            "notes": list(run.splits[name].notes),
            "fingerprint": fingerprint(run.splits[name]),
            "seconds": run.seconds[name],
            "prompt_rows": len(tensors["rows"]),
            "evicted": facts.get("evicted", False),
            "scale": facts.get("scale_u", []),
            "source": facts.get("source"),
            "source_cost": facts.get("source_cost"),
            "pseudo_samples": facts.get("pseudo_samples"),
            "unchanged": run.unchanged[name],
            **run.found[name],
        }
    measured = matrix[0, 0] == matrix[0, 0]
    return {
        "schema": SCHEMA,
        "config": asdict(config),
        "settings": settings,
        "seed": run.seed,
        "stream": Path(config.stream).stem,
        "method": config.method,
        "backbone": {
            "name": backbone.name,
            "family": backbone.family,
            "fingerprint": backbone.fingerprint(),
        },
        "average_score": average_score(matrix),
        "backward_transfer": _known(backward_transfer(matrix)),
        "forgetting": _known(forgetting(run.sampled)),
        "forward_transfer": forward_transfer(matrix) if measured else None,
        "task_found": mean(entry["found"] for entry in run.found.values()),
        "task_free_accuracy": mean(e["task_free_accuracy"] for e in run.found.values()),
        "average_so_far": [_known(value) for value in average_so_far(matrix)],
        "matrix": to_json(matrix),
        "tasks": tasks,
        "queue_keeps": _queue_keeps([stored[name][0] for name in run.tasks]),
        "costs": costs,
        "versions": {
            "qtuning": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "device": torch.cuda.get_device_name() if backbone.device.type == "cuda" else "cpu",
            "float32_products": torch.get_float32_matmul_precision(),
        },
        "began": began.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _known(value: float) -> float | None:
    """None for what was not measured."""
    return None if math.isnan(value) else value


def _queue_keeps(stored: Sequence[Mapping[str, Tensor]]) -> list[list[float]]:
    """Share of each task's own prompt that lies in the span of the queue, after each task.

    Entry [i][j]: of task j's prompt after task i + 1; 1 while it is in the queue whole, less after each trim.
    """
    if "queue" not in stored[0]:
        return []
    prompts = [tensors["prompt"] for tensors in stored]
    return [shares_kept(prompts[: i + 1], own["queue"]) for i, own in enumerate(stored)]
