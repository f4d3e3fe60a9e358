"""Names for groups of runs: the method, and what its preset was changed to.

Runs under different configs never share a label, so that no mean mixes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qtuning.errors import ConfigError
from qtuning.presets import get_preset

Record = dict[str, Any]


def label_runs(records: Sequence[Record]) -> list[str]:
    """A label for each record of one backbone; what differs between runs of the same label is added to it.

    The preset and the other keys of a config come first: mostly they say why settings differ.
    """
    labels = [label_of(record) for record in records]
    labels = _told_apart(labels, [circumstances(record) for record in records])
    return _told_apart(labels, [_settings(record) for record in records])


def label_of(record: Record) -> str:
    """The method and its overrides, as `q-tuning, eviction fifo`; a preset that is gone is named instead."""
    method, preset, raw = record["method"], record["config"]["preset"], record["config"]["settings"]
    if not preset:
        return str(method)
    try:
        standard = get_preset(preset, method)
    except ConfigError:
        return _with(method, {"preset": _preset_name(preset)})
    typed = _settings(record)
    same = {key for key in raw if key in standard and standard[key] in (raw[key], typed[key])}
    return _with(method, {key: typed[key] for key in raw if key not in same})


def circumstances(record: Record) -> dict[str, Any]:
    """A run's config without stream and settings; a preset from a file by the file's name."""
    config = {k: v for k, v in record["config"].items() if k not in ("stream", "settings")}
    return {**config, "preset": _preset_name(config["preset"])}


def _told_apart(labels: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where one label stands for different facts, those that differ are added to it."""
    told = []
    for label, own in zip(labels, facts, strict=True):
        twins = [other for name, other in zip(labels, facts, strict=True) if name == label]
        differing = {k: own[k] for k in own if any(k not in t or t[k] != own[k] for t in twins)}
        told.append(_with(label, differing))
    return told


def _settings(record: Record) -> dict[str, Any]:
    """A config's settings; what came as text from a command line as the number it was read as."""
    raw = record["config"]["settings"]
    return {key: record["settings"].get(key, value) for key, value in raw.items()}


def _preset_name(preset: str) -> str:
    return Path(preset).stem if preset.endswith((".yaml", ".yml")) else preset


def _with(label: str, facts: Mapping[str, Any]) -> str:
    return ", ".join([label, *(f"{key} {_word(facts[key])}" for key in sorted(facts))])


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else f"{value:g}"
