"""Groups of runs that differ only in their seed, and what the paper has for them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml


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
        return (math.nan, None) if None in values else mean_sd(values)

    def mean_matrix(self) -> list[list[float | None]]:
        """Cell by cell the mean over seeds."""
        matrices = [run["matrix"] for run in self.runs]
        return [
            [None if None in cells else statistics.mean(cells) for cells in zip(*rows, strict=True)]
            for rows in zip(*matrices, strict=True)
        ]

    def mean_curve(self) -> list[float]:
        """Average score so far after each task, mean over seeds; empty where a cell that it needs was not measured.

        A task that still gives the answers it gave when learnt counts with its score on all test rows then: cells in
        between have few rows.
        """
        curves = []
        for run in self.runs:
            kept = [task["unchanged"] for task in run["tasks"].values()]
            scores = run["matrix"][1:]
            rows = [
                [scores[j][j] if kept[j] else scores[i][j] for j in range(i + 1)]
                for i in range(len(kept))
            ]
            if any(None in row for row in rows):
                return []
            curves.append([statistics.mean(row) for row in rows])
        return [statistics.mean(points) for points in zip(*curves, strict=True)]

    def when_learnt(self) -> list[float]:
        """Each task's score when it was learnt, mean over seeds; empty for methods that are asked at the end alone."""
        scores = [row[j] for j, row in enumerate(self.mean_matrix()[1:])]
        known = [score for score in scores if score is not None]
        return known if len(known) == len(scores) else []


def mean_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; None for a single value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


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
