"""Losses on logits: cross-entropy on the task, and the two forms of memory retention.

Every function takes logits [..., n, t, v]: n examples, t read-out positions (1 for an encoder), v classes
or vocabulary entries. Leading dimensions are lanes, each with a loss of its own. `IGNORE` marks
positions past the end of a shorter answer, and examples that only fill a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100
HIDDEN = 512
"""Units of each of the discriminator's two hidden layers."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-probability of the targets [..., n, t] (Eq. 1; Eq. 8 under Q-tuning's layout)."""
    each = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return _mean(each.view(targets.shape), targets)


def cross_entropy_in_parts(
    hidden: Tensor, targets: Tensor, logits_of: Callable[[Tensor], Tensor], at_once: int
) -> Tensor:
    """`cross_entropy` of read-outs [n, t, h] with targets [n, t], never with more than `at_once` rows of logits.

    For answers as long as texts, whose logits are a hundred million numbers: a few rows at a time stay in a processor's
    cache. Read-outs alone have a gradient.
    """
    kept = targets != IGNORE
    total: Tensor = _InParts.apply(hidden[kept], targets[kept], logits_of, at_once)  # type: ignore[no-untyped-call]
    return total / kept.sum().clamp(min=1)


class _InParts(torch.autograd.Function):
    """The summed cross-entropy of read-outs [n, h], whose gradient is found beside it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, logits_of: Callable[[Tensor], Tensor], at_once: int
    ) -> Tensor:  # fmt: skip
        """Of what `cross_entropy_in_parts` takes."""
        gradient, total = torch.empty_like(hidden), torch.zeros((), device=hidden.device)
        for first in range(0, len(hidden), at_once):
            rows = slice(first, first + at_once)
            with torch.enable_grad():
                own = hidden[rows].detach().requires_grad_()
                loss = F.cross_entropy(logits_of(own), targets[rows], reduction="sum")
            (gradient[rows],) = torch.autograd.grad(loss, own)
            total = total + loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        """Times what stands above."""
        (gradient,) = ctx.saved_tensors
        return above.to(gradient) * gradient, None, None, None


def kl_retention(new_logits: Tensor, old_logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over positions of KL(new || old) (Eq. 18); `old_logits` carry no gradient.

    The direction is the paper's. The mean, not the paper's sum, so that the memory factor means
    the same at every batch size.
    """
    new = F.log_softmax(new_logits, dim=-1)
    old = F.log_softmax(old_logits.detach(), dim=-1)
    return _mean(F.kl_div(old, new, reduction="none", log_target=True).sum(dim=-1), targets)


def _mean(values: Tensor, targets: Tensor) -> Tensor:
    """Mean of the values [..., n, t] that count -> [...]."""
    kept = targets != IGNORE
    total = values.where(kept, 0).sum(dim=(-2, -1))
    return total / kept.sum(dim=(-2, -1)).clamp(min=1)


def make_discriminator(
    width: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Weights of F_omega of Eq. 7, for a pair of score vectors of `width` each."""
    weights: dict[str, Tensor] = {}
    for name, inner, outer in (
        ("first", 2 * width, HIDDEN),
        ("second", HIDDEN, HIDDEN),
        ("last", HIDDEN, 1),
    ):
        bound = inner**-0.5
        for part, shape in (("weight", (outer, inner)), ("bias", (outer,))):
            drawn = torch.empty(shape, dtype=dtype).uniform_(-bound, bound, generator=generator)
            weights[f"{name}.{part}"] = drawn
    both = weights.pop("first.weight")  # apart, so that lanes of different widths can be stacked
    weights["first.new"], weights["first.old"] = both[:, :width].clone(), both[:, width:].clone()
    return weights


def discriminate(weights: Mapping[str, Tensor], new: Tensor, old: Tensor) -> Tensor:
    """F_omega of Eq. 7: a pair of score vectors [..., n, k] -> [..., n]."""
    first = new @ weights["first.new"].mT + old @ weights["first.old"].mT
    hidden = torch.relu(first + weights["first.bias"][..., None, :])
    hidden = torch.relu(hidden @ weights["second.weight"].mT + weights["second.bias"][..., None, :])
    return (hidden @ weights["last.weight"].mT + weights["last.bias"][..., None, :]).squeeze(-1)


def jsd_retention(
    new: Tensor, old: Tensor, judge: Callable[[Tensor, Tensor], Tensor], count: Tensor
) -> Tensor:
    """Minus the Jensen-Shannon lower bound of the mutual information of new and old [..., n, k] (Eq. 9).

    Of the n examples the first `count` [...] are meant. Pairs of the batch are samples of the joint;
    shifting one side by one example, so that nothing meets its own partner, gives samples of the
    product of marginals. A batch of one has no such pair and contributes nothing.
    """
    old = old.detach()
    place = torch.arange(new.shape[-2], device=new.device)
    other = torch.where(place == 0, count[..., None] - 1, place - 1).clamp(min=0)
    shifted = old.gather(-2, other[..., None].expand_as(old))
    each = F.softplus(-judge(new, old)) + F.softplus(judge(new, shifted))
    meant = (place < count[..., None]) & (count[..., None] > 1)
    return each.where(meant, 0).sum(dim=-1) / count.clamp(min=1)


def label_scores(logits: Tensor, targets: Tensor, columns: Tensor, is_column: Tensor) -> Tensor:
    """What the discriminator sees: log-probabilities of the label tokens, [..., n, t, v] -> [..., n, k].

    Averaged over the answer's positions, restricted to the columns [..., k] that any label uses; 0 where
    `is_column` [..., k] is 0.
    """
    log_probs = F.log_softmax(logits, dim=-1)
    index = columns[..., None, None, :].expand(*log_probs.shape[:-1], -1)
    chosen = log_probs.gather(-1, index) * is_column[..., None, None, :]
    kept = (targets != IGNORE).unsqueeze(-1).to(chosen)
    return (chosen * kept).sum(dim=-2) / kept.sum(dim=-2).clamp(min=1)
