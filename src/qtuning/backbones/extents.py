"""How long a line of rows is (see `lines`): known without asking the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from qtuning.backbones.reading import Row

UNIT = 64
"""Positions by which lines differ at least on a card, whose kernels work on blocks of so many, …"""
CPU_UNIT = 16
"""… and on a CPU, where torch keeps kernels for every length."""
TILE = 64
"""Positions that a kernel's program works on."""


class Extent(NamedTuple):
    """Sizes of a line."""

    positions: int
    """Of prompts, texts and paths, and perhaps a few more that nobody sees."""
    prompted: int
    """Positions of the prompts, which stand first."""

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device) -> Extent:
        """Of rows with any number of paths."""
        prompted = sum(len(slots) for slots in prompts_of(rows)[0])
        texts = sum(len(row.tokens.ids) + sum(map(len, row.paths)) for row in rows)
        return cls(aligned(prompted + texts, device), prompted)


def prompts_of(rows: Sequence[Row]) -> tuple[list[Sequence[int]], list[int]]:
    """The prompts that rows share, and which of them each row has: one object is one prompt, whatever stands in it."""
    prompts = {id(row.slots): row.slots for row in rows}
    number = {each: i for i, each in enumerate(prompts)}
    return list(prompts.values()), [number[id(row.slots)] for row in rows]


def aligned(filled: int, device: torch.device) -> int:
    """Positions of a line with so many filled."""
    unit = CPU_UNIT if device.type == "cpu" else UNIT
    return -(-filled // unit) * unit
