"""Comparisons between groups of runs: on one stream, and on the mean of all streams of a backbone."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from qtuning.evaluation import sign_flip_p
from qtuning.report.tables import Group

Scores = dict[int, float]
"""Average score of each seed."""


@dataclass(frozen=True)
class Overview:
    """All methods on all streams of one backbone, best first."""

    backbone: str
    streams: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Scores, ...], Scores], ...]
    """Method, its scores on each stream (empty where it was not run), and their means for the seeds of all streams."""

    @property
    def has_means(self) -> bool:
        """Whether any method was run on all streams."""
        return any(means for _, _, means in self.rows)


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


@dataclass(frozen=True)
class Square:
    """Every method against every other in one place."""

    where: str
    labels: tuple[str, ...]
    cells: tuple[tuple[Comparison | None, ...], ...]
    """[i][j]: the i-th less the j-th; None where they share no seed."""
    widest: float
    """The largest difference."""


def overviews(groups: Sequence[Group]) -> list[Overview]:
    """One for each backbone with several streams."""
    found = []
    for backbone, places in _places(groups).items():
        if len(places) == 1:
            continue
        averaged = _mean_of(list(places.values()))
        labels = dict.fromkeys(label for scores in places.values() for label in scores)
        rows = [
            (label, tuple(own.get(label, {}) for own in places.values()), averaged.get(label, {}))
            for label in labels
        ]
        rows.sort(key=lambda row: -statistics.mean(row[2].values()) if row[2] else 0.0)
        found.append(Overview(backbone, tuple(places), tuple(rows)))
    return found


def compare(groups: Sequence[Group]) -> list[Comparison]:
    """Every pair of groups on the mean of all streams of a backbone, then on each stream: exact sign-flip tests."""
    by_backbone = _places(groups)
    found = []
    for backbone, places in by_backbone.items():
        if len(places) > 1:
            where = f"mean of {len(places)} streams, {backbone}"
            found += _pairs(where, _mean_of(list(places.values())))
    for backbone, places in by_backbone.items():
        for stream, scores in places.items():
            found += _pairs(f"{stream}, {backbone}", scores)
    return found


def squares(comparisons: Sequence[Comparison]) -> list[Square]:
    """The same comparisons, place by place, best method first."""
    found = []
    for where, pairs in itertools.groupby(comparisons, lambda each: each.where):
        known = {(each.first, each.second): each for each in pairs}
        labels = tuple(dict.fromkeys(name for pair in known for name in pair))
        cells = tuple(
            tuple(known.get((a, b)) or _turned(known.get((b, a))) for b in labels) for a in labels
        )
        widest = max(abs(each.difference) for each in known.values())
        found.append(Square(where, labels, cells, widest))
    return found


def _turned(pair: Comparison | None) -> Comparison | None:
    """The second less the first."""
    if pair is None:
        return None
    return Comparison(pair.where, pair.second, pair.first, -pair.difference, pair.seeds, pair.p)


def _places(groups: Sequence[Group]) -> dict[str, dict[str, dict[str, Scores]]]:
    """Scores by backbone, stream and method."""
    found: dict[str, dict[str, dict[str, Scores]]] = {}
    for group in groups:
        own = {run["seed"]: run["average_score"] for run in group.runs}
        found.setdefault(group.backbone, {}).setdefault(group.stream, {})[group.label] = own
    return found


def _mean_of(streams: Sequence[dict[str, Scores]]) -> dict[str, Scores]:
    """Of each group that all streams have, the mean over them for the seeds that all of them have, best first."""
    found = {}
    for label in streams[0]:
        if all(label in own for own in streams):
            seeds = sorted(set.intersection(*(set(own[label]) for own in streams)))
            found[label] = {s: statistics.mean(own[label][s] for own in streams) for s in seeds}
    shared = {label: scores for label, scores in found.items() if scores}
    return dict(sorted(shared.items(), key=lambda item: -statistics.mean(item[1].values())))


def _pairs(where: str, scores: dict[str, Scores]) -> list[Comparison]:
    """Each with each, paired by seed."""
    found = []
    for (first, a), (second, b) in itertools.combinations(scores.items(), 2):
        differences = [a[seed] - b[seed] for seed in sorted(set(a) & set(b))]
        if differences:
            mean, p = statistics.mean(differences), sign_flip_p(differences)
            found.append(Comparison(where, first, second, mean, len(differences), p))
    return found
