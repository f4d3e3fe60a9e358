"""Named data sets and streams, read from the catalog: one YAML each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from qtuning.errors import ConfigError, unknown
from qtuning.protocols import PROTOCOLS

CARD_KEYS = {"name", "version", "description", "group", "licence", "labels", "label_words"}
CARD_OPTIONS = {"file", "hub", "fields", "metrics", "pairs", "question_id"}
HUB_KEYS = {"id", "config", "label", "test", "columns", "first_label"}
STREAM_KEYS = {"name", "version", "description", "tasks"}
STREAM_OPTIONS = {"protocol"}


@dataclass(frozen=True)
class Card:
    """What the catalog says of a data set."""

    name: str
    version: int
    description: str
    group: str
    licence: str
    labels: Mapping[str, str]
    label_words: Mapping[str, str]
    metrics: Sequence[str] = ("accuracy",)
    fields: Sequence[str] = ("text",)
    """Columns that make the text: one as it is, several as `column: value`, in this order."""
    file: str = ""
    """Texts that ship with the catalog."""
    hub: Mapping[str, Any] = field(default_factory=dict)
    """Where the hub has it: id, config, column of the label, name of the test split."""
    pairs: Mapping[str, Any] = field(default_factory=dict)
    """Tasks of two classes each that this set is split into: prefix of their names, and count."""
    question_id: str = ""
    """Column that says which rows answer the same question, for `exact-match`."""


@dataclass(frozen=True)
class Stream:
    """An ordered list of task names."""

    name: str
    description: str
    tasks: tuple[str, ...]
    protocol: str = "given"
    """Which rows train, validate and test, unless a run says otherwise; see `protocols`."""


@cache
def list_cards() -> dict[str, Card]:
    """All data set cards of the catalog, by name."""
    raw = _read_folder("datasets")
    return {name: read_card(entry, f"datasets/{name}.yaml") for name, entry in raw.items()}


@cache
def list_tasks() -> dict[str, tuple[Card, tuple[str, ...]]]:
    """All tasks by name: a card and the labels used, all of them or a pair."""
    found: dict[str, tuple[Card, tuple[str, ...]]] = {}
    for card in list_cards().values():
        labels = tuple(card.labels)
        found[card.name] = (card, labels)
        for i in range(
            card.pairs.get("count", 0)
        ):  # consecutive label ids; an odd last one is left out
            found[f"{card.pairs['prefix']}-{i}"] = (card, labels[2 * i : 2 * i + 2])
    return found


@cache
def list_streams() -> dict[str, Stream]:
    """All streams of the catalog, by name."""
    raw = _read_folder("streams")
    return {name: read_stream(entry, f"streams/{name}.yaml") for name, entry in raw.items()}


def get_stream(name: str) -> Stream:
    """A stream of the catalog, or of a YAML file of the user's."""
    if name.endswith((".yaml", ".yml")):
        return read_stream(read_yaml(Path(name)), name)
    known = _read_folder("streams")
    if name not in known:
        raise ConfigError(unknown("stream", name, known))
    return read_stream(known[name], f"streams/{name}.yaml")


def read_card(raw: Mapping[str, Any], source: str) -> Card:
    """A card whose keys and label words are checked."""
    _check_keys(raw, CARD_KEYS, CARD_OPTIONS, source)
    _check_keys(raw.get("hub", {}), set(), HUB_KEYS, f"{source}, hub")
    if set(raw["labels"]) != set(raw["label_words"]):
        raise ConfigError(f"{source}: labels and label_words must name the same labels.")
    if not ("file" in raw) ^ ("hub" in raw):
        raise ConfigError(f"{source}: give either file (texts that ship) or hub (texts elsewhere).")
    return Card(**raw)


def read_stream(raw: Mapping[str, Any], source: str) -> Stream:
    """A stream whose tasks are known, or are files."""
    _check_keys(raw, STREAM_KEYS, STREAM_OPTIONS, source)
    tasks = raw["tasks"]
    if not isinstance(tasks, list) or not tasks:
        raise ConfigError(f"{source}: tasks must be a list of names, got {tasks!r}.")
    if len(set(tasks)) != len(tasks):
        twice = next(task for task in tasks if tasks.count(task) > 1)
        raise ConfigError(f"{source}: the task {twice!r} stands in the stream twice; remove one.")
    for task in tasks:
        if not is_file_name(task) and task not in list_tasks():
            raise ConfigError(f"{source}: {unknown('task', str(task), list_tasks())}")
    protocol = str(raw.get("protocol", "given"))
    if protocol not in PROTOCOLS:
        raise ConfigError(f"{source}: {unknown('protocol', protocol, PROTOCOLS)}")
    return Stream(str(raw["name"]), str(raw["description"]), tuple(tasks), protocol)


def is_file_name(task: str) -> bool:
    """Whether an entry of a stream is a table of the user's rather than a name of the catalog."""
    return str(task).endswith((".csv", ".tsv", ".jsonl", ".parquet"))


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping."""
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}; check the path.")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not readable YAML: {str(error).splitlines()[0]}; mend it."
        ) from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values.")
    return raw


def _check_keys(raw: Mapping[str, Any], needed: set[str], optional: set[str], source: str) -> None:
    for key in raw:
        if key not in needed | optional:
            raise ConfigError(f"{source}: {unknown('key', str(key), needed | optional)}")
    for key in needed:
        if key not in raw:
            raise ConfigError(f"{source}: the key {key!r} is missing; add it.")


@cache
def _read_folder(kind: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in sorted((files("qtuning") / "catalog" / kind).iterdir(), key=lambda e: e.name):
        if not entry.name.endswith(".yaml"):
            continue
        raw = yaml.safe_load(entry.read_text(encoding="utf-8"))
        if f"{raw['name']}.yaml" != entry.name:
            raise ConfigError(
                f"{kind}/{entry.name} names itself {raw['name']!r}; file and name must agree."
            )
        found[raw["name"]] = raw
    return found
