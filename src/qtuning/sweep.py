"""A grid of runs: expanded to packs, done one after another here or spread over Ray.

A pack is one config with all its seeds, which share every pass of the model; `together` puts all configs that can
share a pack into one. Packs know nothing of each other, each goes on from its own records, and one that fails does not
stop the rest: so a sweep can be stopped, killed or repeated at will, and ends with the same records wherever it was
computed.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from qtuning.errors import ConfigError, QTuningError, unknown
from qtuning.progress import LearningBar
from qtuning.ray_cluster import cause_of, connected, largest_node
from qtuning.runs import Loaded, RunConfig, company_of, numbered, run_folder, run_together

LISTS = ("streams", "methods", "models", "presets")
"""What a sweep lists; `RunConfig` has one of each."""
FIXED = tuple(
    f.name for f in fields(RunConfig) if f"{f.name}s" not in LISTS and f.name != "settings"
)
"""What is the same for all packs."""


@dataclass(frozen=True)
class Sweep:
    """Every combination of what is listed is a pack."""

    streams: Sequence[str]
    methods: Sequence[str] = ("q-tuning",)
    models: Sequence[str] = ("minilm",)
    presets: Sequence[str] = ("",)
    """`{method}` and `{model}` stand for the pack's: each method can have the preset that was tuned for it."""
    seeds: Sequence[int] = (0,)
    """The seeds of every pack."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """For all packs."""
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Settings with several values each."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of `RunConfig`, for all packs."""
    together: bool | str = False
    """All methods, settings and streams of equally many tasks in one pack, or `streams` alone: pays on a card."""
    parts: Sequence[Sweep] = ()
    """Grids that make up this one, which then has none of its own."""


@dataclass(frozen=True)
class Pack:
    """One config with all its seeds, and others that share its passes."""

    config: RunConfig
    seeds: tuple[int, ...]
    varied: Mapping[str, Any] = field(default_factory=dict)
    company: tuple[Pack, ...] = ()
    """With seeds, but no company, of their own."""

    @property
    def members(self) -> list[Pack]:
        """Each config for itself."""
        return [replace(self, company=()), *self.company]

    @property
    def runs(self) -> list[tuple[RunConfig, int]]:
        """Config and seed of every run, member by member."""
        return [(member.config, seed) for member in self.members for seed in member.seeds]

    @property
    def name(self) -> str:
        """What sets it apart, for people."""
        config = self.config
        own = [f"{name} {value}" for name, value in self.varied.items()]
        words = [config.method, Path(config.stream).stem, Path(config.model).name, *own]
        words += [Path(config.preset).stem] if config.preset else []
        return " · ".join([*words, *([f"and {len(self.company)} more"] if self.company else [])])


@dataclass(frozen=True)
class Outcome:
    """What became of a pack."""

    pack: Pack
    scores: tuple[float, ...] = ()
    """Average score of each seed, member by member."""
    error: str = ""
    """Why it failed, in one line; empty for a finished pack."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where records lie and how a pack is computed: nothing that its result depends on, threads and device aside."""

    root: Path
    data: str | None = None
    device: str | None = None
    compile: str = "auto"
    lanes: int | None = None
    threads: int | None = None
    """Threads of one pack; torch's own choice by default. Sums of other threads may round otherwise."""


After = Callable[[Outcome], None]


def read_sweep(raw: Mapping[str, Any], source: str) -> Sweep:
    """A sweep from a YAML's mapping; unknown keys suggest the nearest, single values stand for lists of one."""
    if "parts" in raw:
        parts = _read_parts(raw, source)
        return Sweep((), parts=[read_sweep(part, name) for name, part in parts.items()])
    known = (*LISTS, "seeds", "settings", "vary", "together", "parts", *FIXED)
    for key in raw:
        if key not in known:
            raise ConfigError(f"{source}: {unknown('key', str(key), known)}")
    if not raw.get("streams"):
        raise ConfigError(
            f"{source}: streams are missing; name one or several that `qtuning ls streams` prints."
        )
    lists = {key: _listed(raw[key], key, source) for key in (*LISTS, "seeds") if key in raw}
    for key, kind in (*((key, str) for key in LISTS), ("seeds", int)):
        for value in lists.get(key, ()):
            if type(value) is not kind:
                wish = "names" if kind is str else "whole numbers"
                raise ConfigError(f"{source}: {key} must be {wish}, got {value!r}.")
    for key in ("settings", "vary"):
        if not isinstance(raw.get(key) or {}, Mapping):
            raise ConfigError(
                f"{source}: {key} must be a mapping of settings to values, got {raw[key]!r}."
            )
    vary = {
        str(name): _listed(values, f"vary {name}", source)
        for name, values in (raw.get("vary") or {}).items()
    }
    together = raw.get("together", False)
    if not isinstance(together, bool) and together != "streams":
        raise ConfigError(f"{source}: together must be true, false or streams, got {together!r}.")
    fixed = numbered({key: raw[key] for key in FIXED if key in raw})
    settings = dict(raw.get("settings") or {})
    return Sweep(**lists, settings=settings, vary=vary, fixed=fixed, together=together)


def joined(sweeps: Sequence[Sweep]) -> Sweep:
    """Several sweeps as one: what can share a pack does, and what is put together alike in several is run once."""
    return Sweep((), parts=[part for each in sweeps for part in each.parts or (each,)])


def override(
    raw: Mapping[str, Any], own: Mapping[str, Any], source: str = "the sweep"
) -> dict[str, Any]:
    """A sweep's mapping with what the flags say.

    Where a part lists streams, methods, models or presets, the flags choose from its list, and a part with none of them
    is left out: its settings were made for what it lists.
    """
    raw = _laid_over(raw, own)
    if not isinstance(raw.get("parts"), list):
        return raw
    told = {*(own.get("settings") or {}), *(own.get("vary") or {})}
    parts = []
    for part in raw["parts"]:
        if not isinstance(part, Mapping):
            return raw  # the reader refuses it
        kept = {k: v for k, v in part.items() if k not in own or k in (*LISTS, "settings", "vary")}
        for key in ("settings", "vary"):
            if isinstance(part.get(key), Mapping):
                kept[key] = {name: v for name, v in part[key].items() if name not in told}
        for key in (key for key in LISTS if key in own and key in part):
            listed = part[key] if isinstance(part[key], list) else [part[key]]
            kept[key] = [each for each in own[key] if each in listed]
        if all(kept.get(key, True) for key in LISTS):
            parts.append(kept)
    if not parts:
        asked = " ".join(str(each) for key in LISTS for each in own.get(key, ()))
        raise ConfigError(f"no part of {source} has all of: {asked}; `--dry-run` prints the packs.")
    return {**raw, "parts": parts}


def _read_parts(raw: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """Every part laid over what is common; its settings count as varied, so that they are in the names of its packs."""
    common = {key: value for key, value in raw.items() if key != "parts"}
    parts = raw["parts"]
    if not isinstance(parts, list) or not parts or not all(isinstance(p, Mapping) for p in parts):
        raise ConfigError(f"{source}: parts must be a list of mappings, got {parts!r}.")
    found = {}
    for i, part in enumerate(parts, start=1):
        whole = _laid_over(common, part)
        if isinstance(part.get("settings"), Mapping):
            single = {name: [value] for name, value in part["settings"].items()}
            kept = {name: v for name, v in whole["settings"].items() if name not in single}
            whole = {**whole, "settings": kept}
            whole = _laid_over(whole, {"vary": single})
        found[f"{source}, part {i}"] = whole
    return found


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `above` count; settings and what is varied name by name, whichever of the two they stand in below."""
    merged = {**below, **above}
    parts = [source.get(key) or {} for source in (below, above) for key in ("settings", "vary")]
    if not all(isinstance(part, Mapping) for part in parts):
        return merged  # the reader refuses it
    told = {*parts[2], *parts[3]}
    for key, own, new in (("settings", parts[0], parts[2]), ("vary", parts[1], parts[3])):
        merged[key] = {**{name: own[name] for name in own if name not in told}, **new}
    return merged


def _listed(value: Any, key: str, source: str) -> tuple[Any, ...]:
    """One value or several different ones."""
    found = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not found:
        raise ConfigError(f"{source}: {key} is an empty list; give at least one value.")
    twice = [each for i, each in enumerate(found) if each in found[:i]]
    if twice:
        raise ConfigError(f"{source}: {key} lists {twice[0]!r} twice; remove one.")
    return found


def expand(sweep: Sweep) -> list[Pack]:
    """All packs, every name and setting checked; combinations that mean the same run are one pack, with all seeds."""
    found: dict[tuple[Path, bool | str], Pack] = {}
    for part in sweep.parts or (sweep,):
        for pack in _grid(part):
            key = run_folder(Path(), pack.config, 0), part.together
            first = found.setdefault(key, pack)
            found[key] = replace(first, seeds=tuple(dict.fromkeys((*first.seeds, *pack.seeds))))
    apart = [pack for (_, together), pack in found.items() if not together]
    joined = [(pack, together) for (_, together), pack in found.items() if together]
    return [*apart, *_joined(joined)]


def _grid(sweep: Sweep) -> Iterator[Pack]:
    """Every combination of what one grid lists."""
    for name in sweep.vary:
        if name in sweep.settings:
            raise ConfigError(f"{name} is both set and varied; leave one of them out.")
    grid = itertools.product(sweep.streams, sweep.models, sweep.presets, sweep.methods)
    for stream, model, preset, method in grid:
        named = preset.replace("{method}", method).replace("{model}", Path(model).name)
        for values in itertools.product(*sweep.vary.values()):
            varied = dict(zip(sweep.vary, values, strict=True))
            config = RunConfig(
                stream=stream,
                method=method,
                model=model,
                preset=named,
                settings={**sweep.settings, **varied},
                **sweep.fixed,
            ).resolved()
            yield Pack(config, tuple(sweep.seeds), varied)


def _joined(packs: Iterable[tuple[Pack, bool | str]]) -> list[Pack]:
    """Packs whose runs can share one as one; of some only those that differ in nothing but their stream."""
    found: dict[tuple[Any, ...], Pack] = {}
    for pack, together in packs:
        alone = replace(pack.config, stream="").short_hash() if together == "streams" else ""
        key = company_of(pack.config), alone
        first = found.setdefault(key, pack)
        if first is not pack:
            found[key] = replace(first, company=(*first.company, pack))
    return list(found.values())


# ── computing ────────────────────────────────────────────────────────────────────────────────


def run_pack(
    pack: Pack, place: Place, loaded: Loaded | None = None, bar: LearningBar | None = None
) -> Outcome:
    """Finish a pack, or say why it cannot be finished; a finished one answers at once.

    If a pack with company fails, its members are tried one by one: what is wrong with one must not stop the others.
    `loaded` keeps the model for the next pack.
    """
    loaded = {} if loaded is None else loaded
    outcome = _try_pack(pack, place, loaded, bar)
    if not outcome.error or not pack.company:
        return outcome
    each = [_try_pack(member, place, loaded, bar) for member in pack.members]
    failed = [f"{own.pack.name}: {own.error}" for own in each if own.error]
    scores = () if failed else tuple(score for own in each for score in own.scores)
    seconds = outcome.seconds + sum(own.seconds for own in each)
    return Outcome(pack, scores, "; ".join(failed), seconds)


def _try_pack(pack: Pack, place: Place, loaded: Loaded, bar: LearningBar | None) -> Outcome:
    import torch

    began, threads = time.perf_counter(), torch.get_num_threads()
    try:
        torch.set_num_threads(place.threads or threads)
        found = run_together(
            pack.runs,
            place.root,
            data=place.data,
            device=place.device,
            compile=place.compile,
            lanes=place.lanes,
            report=bar,
            started=bar.started if bar else None,
            loaded=loaded,
        )
    except Exception as error:  # whatever it is, the other packs go on
        loaded.clear()  # with a model that saw nothing of it
        said = str(error) if isinstance(error, QTuningError) else f"{type(error).__name__}: {error}"
        return Outcome(pack, error=" ".join(said.split()), seconds=time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    scores = tuple(result["average_score"] for result in found)
    return Outcome(pack, scores, seconds=time.perf_counter() - began)


def run_here(
    packs: Sequence[Pack],
    place: Place,
    after: After | None = None,
    bar: LearningBar | None = None,
) -> list[Outcome]:
    """All packs in this process, one after another; packs of one model load and compile it once.

    `after` is called with each when it ends; `bar` shows how far the one under way is.
    """
    found: list[Outcome] = []
    loaded: Loaded = {}
    for pack in packs:
        found.append(run_pack(pack, place, loaded, bar))
        if after:
            after(found[-1])
    return found


def run_on_ray(
    packs: Sequence[Pack],
    place: Place,
    after: After | None = None,
    *,
    address: str | None = None,
    cpus: int | None = None,
    gpus: float | None = None,
    retries: int = 3,
) -> list[Outcome]:
    """All packs as tasks of Ray, as many at a time as there is room for; in the order of `packs`.

    A pack whose worker dies begins again on another and goes on from its records. Nodes must see the same files.

    Args:
        packs: What to do.
        place: Where the records lie; relative paths mean the caller's folder on every node.
        after: Called with each pack when it ends.
        address: See `connected`.
        cpus: Cores and threads of a pack; those of this machine by default, one where a pack has a GPU.
        gpus: GPUs of a pack, a fraction where several share one; one where the cluster has any, by default.
        retries: How often a pack is begun again when its worker dies.
    """
    import torch

    with connected(address) as ray:
        if gpus is None:
            on_card = not place.device or place.device.startswith("cuda")
            gpus = 1.0 if on_card and ray.cluster_resources().get("GPU") else 0.0
        cpus = cpus or (1 if gpus else place.threads or torch.get_num_threads())
        if not (address or os.environ.get("RAY_ADDRESS")):  # a cluster may grow when it is asked
            _check_room(ray, cpus, gpus)
        own = Place(**{**vars(place), "threads": cpus})
        task = ray.remote(_run_pack_in).options(
            num_cpus=cpus, num_gpus=gpus, max_retries=retries, retry_exceptions=False
        )
        waiting = {task.remote(pack, own, os.getcwd()): pack for pack in packs}
        found: dict[int, Outcome] = {}
        while waiting:
            ready, _ = ray.wait(list(waiting))
            pack = waiting.pop(ready[0])
            try:
                outcome = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                died = isinstance(error, ray.exceptions.WorkerCrashedError)
                times = f"its worker died {retries + 1} times: " if died else ""
                outcome = Outcome(pack, error=times + cause_of(error))
            found[id(pack)] = outcome
            if after:
                after(outcome)
    return [found[id(pack)] for pack in packs]


def _run_pack_in(pack: Pack, place: Place, folder: str) -> Outcome:
    """`run_pack` in the caller's folder: relative paths are part of a config and must stay as they are."""
    try:
        os.chdir(folder)
    except OSError:
        return Outcome(pack, error=f"this node has no folder {folder}; share it with all nodes.")
    return run_pack(pack, place)


def _check_room(ray: Any, cpus: int, gpus: float) -> None:
    """Refuse what no node could ever hold; Ray would wait for it without end."""
    for flag, wanted, resource in (("cpus", cpus, "CPU"), ("gpus", gpus, "GPU")):
        most = largest_node(ray, resource)
        if wanted > most:
            raise ConfigError(
                f"--{flag}-per-pack {wanted:g}: no node has so many, the largest has {most:g}; lower it."
            )
