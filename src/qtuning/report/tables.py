"""Groups of runs that differ only in their seed, and comparisons between groups."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from qtuning.evaluation import sign_flip_p


@dataclass(frozen=True)
class Group:
    """All seeds of one method under one config."""

    label: str
    stream: str
    method: str
    backbone: str
    runs: tuple[dict[str, Any], ...]

    @property
    def seeds(self) -> list[int]:
        """Every seed that was run."""
        return [run["seed"] for run in self.runs]

    def values(self, key: str) -> list[float]:
        """One number per seed."""
        return [run[key] for run in self.runs]

    def mean_sd(self, key: str) -> tuple[float, float | None]:
        """Mean and sample standard deviation over seeds; None for a single seed, nan for what was not measured."""
        values = self.values(key)
        if None in values:
            return math.nan, None
        return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None

    def mean_matrix(self) -> list[list[float | None]]:
        """Cell by cell the mean over seeds."""
        matrices = [run["matrix"] for run in self.runs]
        return [
            [None if None in cells else statistics.mean(cells) for cells in zip(*rows, strict=True)]
            for rows in zip(*matrices, strict=True)
        ]

    def mean_curve(self) -> list[float]:
        """Average score so far after each task, mean over seeds; empty where only the end was measured."""
        curves = [run["average_so_far"] for run in self.runs]
        if any(None in curve for curve in curves):
            return []
        return [statistics.mean(points) for points in zip(*curves, strict=True)]

    def when_learnt(self) -> list[float]:
        """Each task's score when it was learnt, mean over seeds; empty for methods that are asked at the end alone."""
        scores = [row[j] for j, row in enumerate(self.mean_matrix()[1:])]
        known = [score for score in scores if score is not None]
        return known if len(known) == len(scores) else []

    def curve_when_learnt(self) -> list[float]:
        """The average of these after each task; empty where they are."""
        sums = itertools.accumulate(self.when_learnt())
        return [total / count for count, total in enumerate(sums, start=1)]


def group_runs(results: Sequence[dict[str, Any]]) -> list[Group]:
    """Runs of the same config together, in order of stream and average score."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        found.setdefault(json.dumps(result["config"], sort_keys=True), []).append(result)
    groups = []
    for runs in found.values():
        runs.sort(key=lambda run: run["seed"])
        first = runs[0]
        groups.append(
            Group(
                first["method"],
                first["stream"],
                first["method"],
                first["backbone"]["name"],
                tuple(runs),
            )
        )
    groups.sort(key=lambda g: (g.stream, g.backbone, -g.mean_sd("average_score")[0]))
    return _told_apart(groups)


def _told_apart(groups: list[Group]) -> list[Group]:
    """Where two groups share stream, method and backbone, the label says which settings differ."""
    labelled = []
    for group in groups:
        twins = [
            g
            for g in groups
            if (g.stream, g.method, g.backbone) == (group.stream, group.method, group.backbone)
        ]
        own = {**group.runs[0]["settings"], **_plain(group.runs[0]["config"])}
        others = [
            {**g.runs[0]["settings"], **_plain(g.runs[0]["config"])}
            for g in twins
            if g is not group
        ]
        # a record from before a setting existed ran with what is its default now
        differing = sorted(
            key for key in own if any(key in o and own[key] != o[key] for o in others)
        )
        extra = ", ".join(f"{key} {own[key]}" for key in differing[:3])
        label = f"{group.method} ({extra})" if extra else group.method
        labelled.append(Group(label, group.stream, group.method, group.backbone, group.runs))
    return labelled


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("settings", "preset")}


@dataclass(frozen=True)
class Comparison:
    """Two groups on the seeds both have."""

    where: str
    """Stream and backbone, or how many streams were averaged."""
    first: str
    second: str
    difference: float
    seeds: int
    p: float


Scores = dict[int, float]
"""Average score of each seed."""


def compare(groups: Sequence[Group]) -> list[Comparison]:
    """Every pair of groups on the mean of all streams of a backbone, then on each stream: exact sign-flip tests."""
    places: dict[tuple[str, str], dict[str, Scores]] = {}
    for group in groups:
        own = {run["seed"]: run["average_score"] for run in group.runs}
        places.setdefault((group.stream, group.backbone), {})[group.label] = own
    found = []
    for backbone in dict.fromkeys(name for _, name in places):
        streams = [own for (_, name), own in places.items() if name == backbone]
        if len(streams) > 1:
            found += _pairs(f"mean of {len(streams)} streams, {backbone}", _mean_of(streams))
    for (stream, backbone), scores in places.items():
        found += _pairs(f"{stream}, {backbone}", scores)
    return found


def _mean_of(streams: Sequence[dict[str, Scores]]) -> dict[str, Scores]:
    """Of each group that all streams have, the mean over them, for the seeds that all of them have."""
    found = {}
    for label in streams[0]:
        if all(label in own for own in streams):
            seeds = set.intersection(*(set(own[label]) for own in streams))
            found[label] = {s: statistics.mean(own[label][s] for own in streams) for s in seeds}
    return found


def _pairs(where: str, scores: dict[str, Scores]) -> list[Comparison]:
    """Each with each, paired by seed."""
    found = []
    for (first, a), (second, b) in itertools.combinations(scores.items(), 2):
        differences = [a[seed] - b[seed] for seed in sorted(set(a) & set(b))]
        if differences:
            mean, p = statistics.mean(differences), sign_flip_p(differences)
            found.append(Comparison(where, first, second, mean, len(differences), p))
    return found


@cache
def paper_results() -> dict[str, dict[str, dict[str, float]]]:
    """What the paper prints: backbone, method, stream -> percent."""
    text = (files("qtuning") / "catalog" / "paper_results.yaml").read_text(encoding="utf-8")
    raw: dict[str, dict[str, dict[str, float]]] = yaml.safe_load(text)
    return raw


def papers_numbers(stream: str, method: str, settings: Mapping[str, Any]) -> list[str]:
    """`79.7 (t5-large)` for each backbone the paper reports this method on, with this queue and rule of eviction."""
    name = _papers_name(method, settings)
    with_size = f"{name}, queue_size {settings.get('queue_size')}"
    found = []
    for backbone, methods in paper_results().items():
        own = {**methods.get(name, {}), **methods.get(with_size, {})}
        found += [f"{own[stream]:.1f} ({backbone})"] if stream in own else []
    return found


def _papers_name(method: str, settings: Mapping[str, Any]) -> str:
    """Of the paper's row; none for an ablation, of which it has no figures for single orders."""
    if method != "q-tuning":
        return method
    parts = (settings["scale"], settings["shared_length"], settings["retention"] != "none")
    rule = settings["eviction"]
    return "" if not all(parts) else method if rule == "pca" else f"{method}, eviction {rule}"
