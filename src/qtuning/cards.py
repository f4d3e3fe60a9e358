"""Model cards, from the templates in `catalog/`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from qtuning import __version__


def render_card(template: str, **values: Any) -> str:
    """A card in Markdown; `template` is a file of `catalog/`."""
    from jinja2 import Environment

    text = (files("qtuning") / "catalog" / template).read_text(encoding="utf-8")
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters |= {"cell": _cell, "scores": _scores}
    return environment.from_string(text).render(version=__version__, **values)


def _cell(value: object) -> str:
    """A label as it may stand in a table."""
    return " ".join(str(value).replace("|", "\\|").split())


def _scores(facts: Mapping[str, Any]) -> str:
    """Two cells of a table: validation and test score, with the number of texts where it is known."""
    sizes = facts.get("split") or {}

    def shown(part: str) -> str:
        value = facts.get(f"{part}_score")
        if value is None:
            return "–"
        return f"{value:.3f} ({sizes[part]} texts)" if part in sizes else f"{value:.3f}"

    return f"{shown('validation')} | {shown('test')}"
