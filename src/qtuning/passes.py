"""Rows of a step in passes of like length: what is short need not be padded to what is long.

Lanes of one pack may learn tasks with texts of any length, under prompts of any length, and retention reads every
text once more under the shared prefix alone. One pass for all of them pads most rows; a pass of its own for a few
rows is mostly launching kernels. So a pass counts as so many positions, and the cheapest cut is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from torch import device

MOST_PASSES = 4
"""Of one step."""
CUTS = 48
"""Places at which rows may be cut, at most."""
UNIT = 8
"""Rows by which passes differ at least."""
CARD_PASS = 2048
"""Positions that are read in the time that another pass costs: on a card, where hundreds of kernels are launched, …"""
CPU_PASS = 128
"""… and on a CPU."""

MOST_SIZES = 3
"""Of the lines of one task."""
SIZE_STEPS = 4
"""Steps that could be taken while one more size is run for the first time and captured."""

Passes = tuple[tuple[int, int], ...]
"""Rows and positions of each pass, longest first; a line is one pass."""


def cut(lengths: np.ndarray, where: device) -> Passes:
    """Passes over rows of these lengths [n], longest first, with the least to compute."""
    count, extra = len(lengths), CARD_PASS if where.type == "cuda" else CPU_PASS
    unit = UNIT * -(-count // (UNIT * CUTS))
    places = [*range(0, count, unit), count]
    # best[k][j]: least cost of the rows before place j in k passes, and the place at which the last of them begins
    best = [[(np.inf, 0)] * len(places) for _ in range(MOST_PASSES + 1)]
    best[0][0] = (0.0, 0)
    for k in range(1, MOST_PASSES + 1):
        for j in range(1, len(places)):
            best[k][j] = min(
                (best[k - 1][i][0] + (places[j] - places[i]) * lengths[places[i]] + extra, i)
                for i in range(j)
            )
    passes, j = [], len(places) - 1
    for k in range(min(range(1, MOST_PASSES + 1), key=lambda k: best[k][-1][0]), 0, -1):
        i = best[k][j][1]
        passes.append((places[j] - places[i], int(lengths[places[i]])))
        j = i
    return tuple(reversed(passes))


def fits(lengths: np.ndarray, passes: Passes) -> bool:
    """Whether rows of these lengths [n], longest first, have room in the passes."""
    first = 0
    for rows, width in passes:
        if lengths[first] > width:
            return False
        first += rows
    return True


def few_sizes(needed: Sequence[int]) -> tuple[int, ...]:
    """Sizes, the largest last, for steps that need so many positions each: those of sixteen with least to compute."""
    if not needed:
        return ()
    in_order = np.sort(np.array(needed))
    most = int(in_order[-1])
    shares = np.quantile(in_order, np.arange(1, 16) / 16, method="higher")
    candidates = sorted({int(each) for each in shares} - {most})
    choices = [
        (*chosen, most)
        for count in range(MOST_SIZES)
        for chosen in itertools.combinations(candidates, count)
    ]

    def cost(sizes: tuple[int, ...]) -> int:
        own = np.array(sizes)[np.searchsorted(sizes, in_order)]
        return int(own.sum()) + len(sizes) * SIZE_STEPS * most

    return min(choices, key=cost)
