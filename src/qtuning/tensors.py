"""Tensors by name: `first.second` belongs to the group `first`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def part(tensors: Mapping[str, Tensor], first: str) -> dict[str, Tensor]:
    """The tensors of a group, by the rest of their names."""
    prefix = f"{first}."
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
