"""Hyper-parameters under a name: the paper's table, and our own for the small real backbones."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from qtuning.config import make_settings
from qtuning.errors import ConfigError, unknown


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
    """The settings of a preset."""
    known = list_presets()
    if name not in known:
        raise ConfigError(unknown("preset", name, known))
    return dict(known[name]["settings"])
