"""Finds the records under some folders, finished or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qtuning.errors import RecordError
from qtuning.records import SCHEMA


@dataclass(frozen=True)
class Unfinished:
    """A run that has no result yet: where it stands, from its events."""

    folder: str
    stream: str
    method: str
    seed: int
    tasks_done: list[str]
    scores: list[float]


@dataclass(frozen=True)
class Records:
    """All runs found, and the files that could not be read."""

    results: list[dict[str, Any]]
    unfinished: list[Unfinished]
    unreadable: list[str]


def gather(places: Sequence[Path]) -> Records:
    """Every run below the given folders (or the given result files)."""
    results: list[dict[str, Any]] = []
    unfinished: list[Unfinished] = []
    unreadable: list[str] = []
    for place in places:
        if not place.exists():
            raise RecordError(f"there is no folder {str(place)!r}; make records with qtuning run.")
        configs = sorted(place.rglob("config.yaml"))
        files = [place] if place.is_file() else sorted(place.rglob("result.json"))
        for file in files:
            try:
                result = json.loads(file.read_text(encoding="utf-8"))
                if result["schema"] > SCHEMA:
                    raise ValueError(
                        f"schema {result['schema']} is newer than {SCHEMA}; upgrade qtuning"
                    )
                results.append({**result, "folder": str(file.parent)})
            except (OSError, ValueError, KeyError, TypeError) as error:
                unreadable.append(f"{file}: {error}")
        unfinished += [_standing(c) for c in configs if not (c.parent / "result.json").exists()]
    if not results and not unfinished:
        names = ", ".join(map(str, places))
        raise RecordError(f"no records under {names}; make some with qtuning run.")
    return Records(results, unfinished, unreadable)


def _standing(config: Path) -> Unfinished:
    raw = yaml.safe_load(config.read_text(encoding="utf-8"))
    events: list[dict[str, Any]] = []
    log = config.parent / "events.jsonl"
    if log.exists():
        for line in log.read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue  # the last line of a run that was cut off
    done = [event for event in events if event["event"] == "task"]
    return Unfinished(
        folder=str(config.parent),
        stream=Path(raw["stream"]).stem,
        method=raw["method"],
        seed=raw["seed"],
        tasks_done=[event["task"] for event in done],
        scores=[event["score"] for event in done],
    )
