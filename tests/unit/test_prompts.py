from __future__ import annotations

import numpy as np
import torch

from qtuning.prompts import (
    compose,
    make_mlp,
    residual_mlp,
    sample_vocabulary_rows,
    scale_rows,
)
from qtuning.seeding import torch_generator


def test_prompts_start_from_vocabulary_rows() -> None:
    table = torch.randn(50, 6)
    rows = sample_vocabulary_rows(
        lambda ids: table[ids], list(range(10, 50)), 7, torch_generator(0)
    )
    again = sample_vocabulary_rows(
        lambda ids: table[ids], list(range(10, 50)), 7, torch_generator(0)
    )
    assert torch.equal(rows, again)
    places = [int((table == row).all(dim=1).nonzero()[0]) for row in rows]
    assert min(places) >= 10
    assert sample_vocabulary_rows(lambda ids: table[ids], [1], 0, torch_generator(0)).shape == (
        0,
        6,
    )


def test_scale_is_the_rank_one_hadamard_product() -> None:
    rows, u, v = torch.randn(5, 4), torch.randn(5), torch.randn(4)
    expected = np.outer(u.numpy(), v.numpy()) * rows.numpy()
    np.testing.assert_allclose(scale_rows(rows, u, v).numpy(), expected, rtol=1e-6)


def test_residual_mlp_against_numpy() -> None:
    mlp = make_mlp(4, 16, torch_generator(1), torch.float64)
    rows = torch.randn(3, 4, dtype=torch.float64)
    w1, b1, w2, b2 = (weight.numpy() for weight in mlp.values())
    expected = rows.numpy() + np.maximum(rows.numpy() @ w1.T + b1, 0) @ w2.T + b2
    np.testing.assert_allclose(residual_mlp(rows, mlp).numpy(), expected, atol=1e-12)


def test_compose_orders_and_scales() -> None:
    shared, queue, prompt = (
        torch.full((1, 2), 1.0),
        torch.full((2, 2), 2.0),
        torch.full((1, 2), 3.0),
    )
    u, v = (torch.tensor([1.0, 10.0]), torch.tensor([100.0])), torch.tensor([1.0, 2.0])
    assert compose(shared, queue, prompt, *u, v).tolist() == [[1, 1], [2, 4], [20, 40], [300, 600]]
    newest = compose(shared, queue, prompt, *u, v, scale_prompt=False, newest_first=True)
    assert newest.tolist() == [[1, 1], [3, 3], [2, 4], [20, 40]]


def test_scale_gradients_by_finite_differences() -> None:
    shared = torch.zeros(0, 3, dtype=torch.float64)
    queue, prompt = torch.randn(2, 3, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)
    u, v = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(
        lambda a, b: compose(shared, queue, prompt, a[:2], a[2:], b), (u, v)
    )


def test_stacked_lanes_compose_as_each_does_alone() -> None:
    sizes = [(5, 2, 3), (5, 3, 3), (5, 1, 3), (5, 3), (5, 1), (5, 3)]
    parts = [torch.randn(size, dtype=torch.float64) for size in sizes]
    together = compose(*parts)
    for lane in range(5):
        torch.testing.assert_close(together[lane], compose(*(each[lane] for each in parts)))
