"""Tensors by name, `first.second` belongs to the group `first`; and many as parts of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def part(tensors: Mapping[str, Tensor], first: str) -> dict[str, Tensor]:
    """The tensors of a group, by the rest of their names."""
    prefix = f"{first}."
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def cut_like(flat: Tensor, shapes: Sequence[Tensor]) -> list[Tensor]:
    """One long tensor [n], cut into parts of these tensors' sizes and shapes, n numbers in all."""
    pieces = torch.split(flat, [each.numel() for each in shapes])
    return [piece.view_as(each) for piece, each in zip(pieces, shapes, strict=True)]
