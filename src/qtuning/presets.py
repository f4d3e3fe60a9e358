"""Hyper-parameters under a name: the paper's table, and our own for the small real backbones."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from qtuning.config import make_settings
from qtuning.errors import ConfigError, unknown
from qtuning.streams import read_yaml


@cache
def list_presets() -> dict[str, dict[str, Any]]:
    """All presets of the catalog, by name: a description and settings."""
    raw: dict[str, dict[str, Any]] = yaml.safe_load(
        (files("qtuning") / "catalog" / "presets.yaml").read_text(encoding="utf-8")
    )
    for entry in raw.values():
        make_settings(**entry["settings"])
    return raw


def get_preset(name: str) -> dict[str, Any]:
    """The settings of a preset of the catalog, or of a YAML file such as `qtuning tune` writes."""
    if name.endswith((".yaml", ".yml")):
        raw = read_yaml(Path(name))
        if not isinstance(raw.get("settings"), dict):
            raise ConfigError(f"{name}: the key 'settings' is missing; it holds the settings.")
        make_settings(**raw["settings"])
        return dict(raw["settings"])
    known = list_presets()
    if name not in known:
        raise ConfigError(unknown("preset", name, known))
    return dict(known[name]["settings"])
