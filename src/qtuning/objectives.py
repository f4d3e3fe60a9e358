"""Losses on logits: cross-entropy on the task, and the two forms of memory retention.

Every function takes logits [n, t, v]: n examples, t read-out positions (1 for an encoder), v classes
or vocabulary entries. `IGNORE` marks positions past the end of a shorter answer.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORE = -100


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-probability of the targets [n, t] (Eq. 1; Eq. 8 under Q-tuning's layout)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


def kl_retention(new_logits: Tensor, old_logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over positions of KL(new || old) (Eq. 18); `old_logits` carry no gradient.

    The direction is the paper's. The mean, not the paper's sum, so that the memory factor means
    the same at every batch size.
    """
    new = F.log_softmax(new_logits, dim=-1)
    old = F.log_softmax(old_logits.detach(), dim=-1)
    divergence = F.kl_div(old, new, reduction="none", log_target=True).sum(dim=-1)
    kept = targets != IGNORE
    return divergence[kept].mean()


class Discriminator(nn.Module):
    """F_omega of Eq. 7: a pair of score vectors [n, 2 k] -> [n]; two hidden layers of 512."""

    def __init__(self, width: int, generator: torch.Generator, dtype: torch.dtype):
        super().__init__()
        sizes = [2 * width, 512, 512, 1]
        layers: list[nn.Module] = []
        for inner, outer in itertools.pairwise(sizes):
            layer = nn.Linear(inner, outer, dtype=dtype)
            bound = inner**-0.5
            for parameter in (layer.weight, layer.bias):
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
            layers += [layer, nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, pairs: Tensor) -> Tensor:
        """[n, 2 k] -> [n]."""
        out: Tensor = self.layers(pairs).squeeze(-1)
        return out


def jsd_retention(new: Tensor, old: Tensor, discriminator: nn.Module) -> Tensor:
    """Minus the Jensen-Shannon lower bound of the mutual information of new and old [n, k] (Eq. 9).

    Pairs of the batch are samples of the joint; shifting one side by one example, so that nothing
    meets its own partner, gives samples of the product of marginals. A batch of one has no such
    pair and contributes nothing.
    """
    if len(new) < 2:
        return new.sum() * 0.0
    old = old.detach()
    joint = discriminator(torch.cat([new, old], dim=-1))
    marginal = discriminator(torch.cat([new, old.roll(1, dims=0)], dim=-1))
    return F.softplus(-joint).mean() + F.softplus(marginal).mean()


def label_scores(logits: Tensor, targets: Tensor, columns: Tensor) -> Tensor:
    """What the discriminator sees: log-probabilities of the label tokens, [n, t, v] -> [n, k].

    Averaged over the answer's positions, restricted to the columns that any label uses.
    """
    log_probs = F.log_softmax(logits, dim=-1)[..., columns]
    kept = (targets != IGNORE).unsqueeze(-1).to(log_probs)
    return (log_probs * kept).sum(dim=1) / kept.sum(dim=1)
