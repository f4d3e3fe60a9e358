"""Named tasks and streams, read from the catalog: one YAML each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from typing import Any

import yaml

from qtuning.errors import ConfigError, unknown
from qtuning.task_files import read_task
from qtuning.tasks import Task

CARD_KEYS = {"name", "version", "description", "group", "licence", "file", "metric", "labels",
             "label_words"}  # fmt: skip
STREAM_KEYS = {"name", "version", "description", "tasks"}


@dataclass(frozen=True)
class Stream:
    """An ordered list of task names."""

    name: str
    description: str
    tasks: tuple[str, ...]


def list_cards() -> dict[str, dict[str, Any]]:
    """All data set cards of the catalog, by name."""
    return _read_folder("datasets", frozenset(CARD_KEYS))


def list_streams() -> dict[str, Stream]:
    """All streams of the catalog, by name."""
    found = {}
    for name, raw in _read_folder("streams", frozenset(STREAM_KEYS)).items():
        for task in raw["tasks"]:
            if task not in list_cards():
                raise ConfigError(f"stream {name!r}: {unknown('task', task, list_cards())}")
        found[name] = Stream(name, raw["description"], tuple(raw["tasks"]))
    return found


def get_stream(name: str) -> Stream:
    """The stream of that name."""
    known = list_streams()
    if name not in known:
        raise ConfigError(unknown("stream", name, known))
    return known[name]


def load_task(name: str) -> Task:
    """A task of the catalog, with its texts."""
    cards = list_cards()
    if name not in cards:
        raise ConfigError(unknown("task", name, cards))
    card = cards[name]
    with as_file(files("qtuning") / "catalog" / card["file"]) as path:
        return read_task(
            path,
            name,
            label_names=list(card["labels"]),
            label_words=card["label_words"],
            metric=card["metric"],
            description=card["description"],
        )


@cache
def _read_folder(kind: str, keys: frozenset[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in sorted((files("qtuning") / "catalog" / kind).iterdir(), key=lambda e: e.name):
        if not entry.name.endswith(".yaml"):
            continue
        raw = yaml.safe_load(entry.read_text(encoding="utf-8"))
        for key in raw:
            if key not in keys:
                raise ConfigError(f"{kind}/{entry.name}: {unknown('key', key, keys)}")
        if f"{raw['name']}.yaml" != entry.name:
            raise ConfigError(
                f"{kind}/{entry.name} names itself {raw['name']!r}; file and name must agree."
            )
        found[raw["name"]] = raw
    return found
