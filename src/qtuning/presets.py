"""Hyper-parameters under a name: the paper's table, and our own for the small real backbones."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from qtuning.config import make_settings
from qtuning.errors import ConfigError, unknown
from qtuning.streams import read_yaml


@cache
def list_presets() -> dict[str, dict[str, Any]]:
    """All presets of the catalog, by name: a description, settings, and what single methods have otherwise."""
    raw: dict[str, dict[str, Any]] = yaml.safe_load(
        (files("qtuning") / "catalog" / "presets.yaml").read_text(encoding="utf-8")
    )
    for entry in raw.values():
        for own in ({}, *entry.get("methods", {}).values()):
            make_settings(**{**entry["settings"], **own})
    return raw


def get_preset(name: str | PathLike[str], method: str = "") -> dict[str, Any]:
    """A method's settings in a preset of the catalog, or in a YAML file such as `qtuning tune` writes."""
    name = str(name)
    if name.endswith((".yaml", ".yml")):
        entry = read_yaml(Path(name))
        if not isinstance(entry.get("settings"), dict):
            raise ConfigError(f"{name}: the key 'settings' is missing; it holds the settings.")
    elif name in list_presets():
        entry = list_presets()[name]
    else:
        raise ConfigError(unknown("preset", name, list_presets()))
    settings = {**entry["settings"], **entry.get("methods", {}).get(method, {})}
    make_settings(**settings)
    return settings
