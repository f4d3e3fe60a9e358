"""Passes of like length: against every possible cut, and as properties."""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch

from qtuning import passes
from qtuning.passes import cut, few_sizes, fits

CPU = torch.device("cpu")


def cost(lengths, found) -> int:
    total, first = 0, 0
    for rows, width in found:
        assert lengths[first] == width
        total += rows * width + passes.CPU_PASS
        first += rows
    assert first == len(lengths)
    return total


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_is_cheaper(seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = -np.sort(-draw.integers(5, 300, draw.integers(3, 60)))
    places = range(8, len(lengths), 8)
    costs = []
    for count in range(passes.MOST_PASSES):
        for chosen in combinations(places, count):
            ends = [0, *chosen, len(lengths)]
            sizes = [b - a for a, b in pairwise(ends)]
            costs.append(
                sum(n * lengths[a] + passes.CPU_PASS for n, a in zip(sizes, ends, strict=False))
            )
    assert cost(lengths, cut(lengths, CPU)) == min(costs)


def test_equal_lengths_are_one_pass() -> None:
    assert cut(np.full(40, 64), CPU) == ((40, 64),)
    assert cut(np.array([7]), CPU) == ((1, 7),)


def test_many_rows_are_cut_at_few_places() -> None:
    lengths = -np.sort(-np.random.default_rng(0).integers(5, 300, 1500))
    found = cut(lengths, CPU)
    assert len(found) == passes.MOST_PASSES
    assert cost(lengths, found) < 0.7 * 1500 * lengths[0]


def test_rows_that_are_too_long_do_not_fit() -> None:
    assert fits(np.array([9, 5, 5]), ((1, 9), (2, 5)))
    assert not fits(np.array([9, 6, 5]), ((1, 9), (2, 5)))


def test_sizes_of_lines_are_few_and_cheapest() -> None:
    draw = np.random.default_rng(0)
    needed = (64 * draw.integers(10, 100, size=150)).tolist()
    found = few_sizes(needed)
    assert found[-1] == max(needed)
    assert len(found) == passes.MOST_SIZES

    def cost(sizes: tuple[int, ...]) -> int:
        own = sum(min(size for size in sizes if size >= each) for each in needed)
        return own + len(sizes) * passes.SIZE_STEPS * max(needed)

    for others in combinations(range(0, max(needed), 320), passes.MOST_SIZES - 1):
        assert cost(found) <= 1.02 * cost(
            (*others, max(needed))
        )  # a finer choice would gain little
    assert cost(found) < 0.9 * cost((max(needed),))
    assert few_sizes([640] * 9) == (640,)
    assert few_sizes([64, 640]) == (640,)  # two steps do not repay another size
    assert few_sizes([]) == ()
