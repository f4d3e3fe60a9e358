from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qtuning.objectives import (
    IGNORE,
    cross_entropy,
    cross_entropy_in_parts,
    discriminate,
    jsd_retention,
    kl_retention,
    label_scores,
    make_discriminator,
)
from qtuning.seeding import torch_generator


def test_cross_entropy_against_numpy_with_padding() -> None:
    logits = torch.randn(3, 2, 5, dtype=torch.float64)
    targets = torch.tensor([[1, 4], [0, IGNORE], [2, IGNORE]])
    logs = logits.numpy() - np.log(np.exp(logits.numpy()).sum(-1, keepdims=True))
    expected = -(logs[0, 0, 1] + logs[0, 1, 4] + logs[1, 0, 0] + logs[2, 0, 2]) / 4
    assert float(cross_entropy(logits, targets)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_cross_entropy_in_parts_is_cross_entropy(at_once: int) -> None:
    """Value and gradient, of numbers that have been through a layer; no more logits at once than asked."""
    weight, above = torch.randn(11, 5, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    states = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (3, 4))
    targets[1, 2:] = IGNORE
    rows = []

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(hidden[..., 0].numel())
        return hidden @ weight.T

    whole = 0.3 * cross_entropy(logits_of(states @ above), targets)
    rows.clear()
    parts = 0.3 * cross_entropy_in_parts(states @ above, targets, logits_of, at_once)
    assert sum(rows) == 10
    assert max(rows) <= at_once
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    expected, found = (torch.autograd.grad(loss, states)[0] for loss in (whole, parts))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_nothing_to_write_costs_nothing() -> None:
    states = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy_in_parts(states, torch.full((2, 3), IGNORE), lambda h: h, 4)
    assert float(loss.detach()) == 0
    assert not torch.autograd.grad(loss, states)[0].any()


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


def product(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new[..., 0] * old[..., 0]


def test_jsd_bound_by_hand() -> None:
    new, old = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [-1.0]])
    soft = lambda t: math.log1p(math.exp(t))  # noqa: E731
    expected = (soft(-3) + soft(2)) / 2 + (soft(-1) + soft(6)) / 2
    found = jsd_retention(new, old, product, torch.tensor(2))
    assert float(found) == pytest.approx(expected, abs=1e-6)
    filled = [torch.cat([each, torch.full((3, 1), 99.0)]) for each in (new, old)]
    again = jsd_retention(*filled, product, torch.tensor(2))  # rows that only fill the batch
    assert float(again) == pytest.approx(expected, abs=1e-6)


def test_a_batch_of_one_contributes_nothing() -> None:
    new = torch.randn(1, 3, requires_grad=True)
    net = make_discriminator(3, torch_generator(0), torch.float32)
    loss = jsd_retention(
        new, torch.randn(1, 3), lambda a, b: discriminate(net, a, b), torch.tensor(1)
    )
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(new.grad, torch.zeros(1, 3))


def test_discriminator_has_two_hidden_layers_of_512() -> None:
    net = make_discriminator(3, torch_generator(0), torch.float64)
    new, old = torch.randn(2, 4, 3, dtype=torch.float64)
    w = {name: weight.numpy() for name, weight in net.items()}
    whole = np.concatenate([w["first.new"], w["first.old"]], axis=1)
    assert whole.shape == (512, 6)
    assert w["second.weight"].shape == (512, 512)
    pairs = np.concatenate([new.numpy(), old.numpy()], axis=1)
    hidden = np.maximum(pairs @ whole.T + w["first.bias"], 0)
    hidden = np.maximum(hidden @ w["second.weight"].T + w["second.bias"], 0)
    expected = (hidden @ w["last.weight"].T + w["last.bias"])[:, 0]
    np.testing.assert_allclose(discriminate(net, new, old).numpy(), expected, atol=1e-12)


def test_losses_of_stacked_lanes_are_those_of_each_alone() -> None:
    logits, old = torch.randn(2, 3, 4, 2, 5, dtype=torch.float64)
    targets = torch.randint(0, 5, (3, 4, 2))
    targets[1, 2:] = IGNORE
    together = cross_entropy(logits, targets), kl_retention(logits, old, targets)
    for lane in range(3):
        alone = (
            cross_entropy(logits[lane], targets[lane]),
            kl_retention(logits[lane], old[lane], targets[lane]),
        )
        torch.testing.assert_close((together[0][lane], together[1][lane]), alone)


def jsd_estimate(rho: float, steps: int = 250) -> float:
    """The estimated Jensen-Shannon information of a Gaussian pair of correlation rho, on fresh samples."""
    generator = torch_generator("gauss", str(rho))
    net = make_discriminator(1, generator, torch.float32)
    optimiser = torch.optim.Adam([weight.requires_grad_() for weight in net.values()], 1e-3)

    def bound(n: int) -> torch.Tensor:
        return jsd_retention(*pairs(n), lambda a, b: discriminate(net, a, b), torch.tensor(n))

    def pairs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, noise = torch.randn(2, n, 1, generator=generator)
        return x, rho * x + (1 - rho**2) ** 0.5 * noise

    for _ in range(steps):
        optimiser.zero_grad()
        bound(256).backward()
        optimiser.step()
    with torch.no_grad():
        return 2 * math.log(2) - float(bound(20_000))


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
    found = label_scores(logits, targets, columns, torch.ones(2))
    torch.testing.assert_close(found[0], logs[0, :, columns].mean(0))
    torch.testing.assert_close(found[1], logs[1, 0, columns])
