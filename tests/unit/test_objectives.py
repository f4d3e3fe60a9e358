from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qtuning.objectives import (
    IGNORE,
    Discriminator,
    cross_entropy,
    jsd_retention,
    kl_retention,
    label_scores,
)
from qtuning.seeding import torch_generator


def test_cross_entropy_against_numpy_with_padding() -> None:
    logits = torch.randn(3, 2, 5, dtype=torch.float64)
    targets = torch.tensor([[1, 4], [0, IGNORE], [2, IGNORE]])
    logs = logits.numpy() - np.log(np.exp(logits.numpy()).sum(-1, keepdims=True))
    expected = -(logs[0, 0, 1] + logs[0, 1, 4] + logs[1, 0, 0] + logs[2, 0, 2]) / 4
    assert float(cross_entropy(logits, targets)) == pytest.approx(expected, abs=1e-12)


def test_kl_by_hand_and_by_torch() -> None:
    new = torch.log(torch.tensor([[[0.5, 0.5]], [[0.9, 0.1]]]))
    old = torch.log(torch.tensor([[[0.25, 0.75]], [[0.9, 0.1]]]))
    targets = torch.zeros(2, 1, dtype=torch.long)
    by_hand = (0.5 * math.log(2) + 0.5 * math.log(2 / 3) + 0.0) / 2
    assert float(kl_retention(new, old, targets)) == pytest.approx(by_hand, abs=1e-6)
    new, old = torch.randn(6, 3, 7), torch.randn(6, 3, 7)
    targets = torch.randint(0, 7, (6, 3))
    targets[2:, 2] = IGNORE
    kept = targets != IGNORE
    by_torch = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=new[kept]),
        torch.distributions.Categorical(logits=old[kept]),
    )
    assert float(kl_retention(new, old, targets)) == pytest.approx(float(by_torch.mean()), abs=1e-6)
    assert float(kl_retention(new, new, targets)) == pytest.approx(0, abs=1e-7)


def test_kl_has_the_papers_direction_and_a_frozen_teacher() -> None:
    targets = torch.zeros(1, 1, dtype=torch.long)
    new = torch.tensor([[[2.0, 0.0]]], requires_grad=True)
    old = torch.tensor([[[0.0, 1.0]]], requires_grad=True)
    loss = kl_retention(new, old, targets)
    p, q = F.softmax(new.detach(), -1), F.softmax(old.detach(), -1)
    assert float(loss.detach()) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-6)
    assert float(loss.detach()) != pytest.approx(float((q * (q / p).log()).sum()), abs=1e-3)
    loss.backward()
    assert new.grad is not None
    assert old.grad is None


def test_jsd_bound_by_hand() -> None:
    class Product(torch.nn.Module):
        def forward(self, pairs: torch.Tensor) -> torch.Tensor:
            return pairs[:, 0] * pairs[:, 1]

    new, old = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [-1.0]])
    soft = lambda t: math.log1p(math.exp(t))  # noqa: E731
    expected = (soft(-3) + soft(2)) / 2 + (soft(-1) + soft(6)) / 2
    assert float(jsd_retention(new, old, Product())) == pytest.approx(expected, abs=1e-6)


def test_a_batch_of_one_contributes_nothing() -> None:
    new = torch.randn(1, 3, requires_grad=True)
    loss = jsd_retention(
        new, torch.randn(1, 3), Discriminator(3, torch_generator(0), torch.float32)
    )
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(new.grad, torch.zeros(1, 3))


def test_discriminator_has_two_hidden_layers_of_512() -> None:
    net = Discriminator(3, torch_generator(0), torch.float32)
    assert [tuple(p.shape) for p in net.parameters() if p.dim() == 2] == [
        (512, 6),
        (512, 512),
        (1, 512),
    ]


def jsd_estimate(rho: float, steps: int = 250) -> float:
    """The estimated Jensen-Shannon information of a Gaussian pair of correlation rho, on fresh samples."""
    generator = torch_generator("gauss", str(rho))
    net = Discriminator(1, generator, torch.float32)
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)

    def pairs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, noise = torch.randn(2, n, 1, generator=generator)
        return x, rho * x + (1 - rho**2) ** 0.5 * noise

    for _ in range(steps):
        optimiser.zero_grad()
        jsd_retention(*pairs(256), net).backward()
        optimiser.step()
    with torch.no_grad():
        return 2 * math.log(2) - float(jsd_retention(*pairs(20_000), net))


def test_jsd_rises_with_the_correlation_of_a_gaussian_pair() -> None:
    """Its mutual information, -log(1 - rho^2) / 2, is 0, 0.14, 0.51 and 1.16."""
    found = [jsd_estimate(rho) for rho in (0.0, 0.5, 0.8, 0.95)]
    assert found == sorted(found)
    assert all(later - earlier > 0.03 for earlier, later in itertools.pairwise(found))
    assert abs(found[0]) < 0.02  # independent: nothing to find


def test_label_scores_average_the_answers_positions() -> None:
    logits = torch.randn(2, 2, 6)
    targets = torch.tensor([[1, 2], [3, IGNORE]])
    columns = torch.tensor([1, 3])
    logs = F.log_softmax(logits, -1)
    found = label_scores(logits, targets, columns)
    torch.testing.assert_close(found[0], logs[0, :, columns].mean(0))
    torch.testing.assert_close(found[1], logs[1, 0, columns])
