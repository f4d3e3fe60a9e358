"""Soft prompts, the residual MLP they may be trained through, and the rank-one scale.

The paper's symbols: a prompt is theta_P^i, the shared prefix theta_P*, the scale W^i = u_i (x) v_i^T,
the prompt length l, the embedding width d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def sample_vocabulary_rows(
    embed: Callable[[Tensor], Tensor],
    vocabulary: Sequence[int],
    length: int,
    generator: torch.Generator,
) -> Tensor:
    """A new prompt [length, d]: the embeddings of uniformly drawn vocabulary tokens.

    Paper: "Prompts are initialized from randomly sampled tokens" (appendix, implementation details).
    """
    drawn = torch.randint(len(vocabulary), (length,), generator=generator)
    ids = torch.tensor([vocabulary[i] for i in drawn.tolist()], dtype=torch.long)
    return embed(ids).detach().clone()


class ResidualMLP(nn.Module):
    """Maps prompt rows [n, d] to rows + W2 relu(W1 rows), each row on its own.

    Paper: "two-layer residual MLP" (Fig. 1), hidden 512, ReLU (appendix).
    """

    def __init__(self, dim: int, hidden: int, generator: torch.Generator, dtype: torch.dtype):
        super().__init__()
        self.inner = nn.Linear(dim, hidden, dtype=dtype)
        self.outer = nn.Linear(hidden, dim, dtype=dtype)
        for layer in (self.inner, self.outer):
            bound = layer.in_features**-0.5
            for parameter in (layer.weight, layer.bias):
                nn.init.uniform_(parameter, -bound, bound, generator=generator)

    def forward(self, rows: Tensor) -> Tensor:
        """[n, d] -> [n, d]."""
        out: Tensor = rows + self.outer(torch.relu(self.inner(rows)))
        return out


def scale_rows(rows: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """W o rows with W = u v^T: rows [n, d], u [n], v [d] -> [n, d].

    Paper: Eq. 3 and the text before it; n + d trained numbers instead of n * d.
    """
    return rows * u[:, None] * v[None, :]


def compose(
    shared_prefix: Tensor,
    queue_rows: Tensor,
    prompt: Tensor,
    u: Tensor,
    v: Tensor,
    *,
    scale_prompt: bool = True,
    newest_first: bool = False,
) -> Tensor:
    """The layout of one task, [theta*; W o (queue, prompt)]: what stands before its text.

    Paper: the conditioning of Eq. 8.

    Args:
        shared_prefix: [s, d], s may be 0.
        queue_rows: [q, d], in the order in which they stand in the sequence.
        prompt: [l, d], the current task's.
        u: [q + l] weights of the rows, in the order (queue, prompt).
        v: [d] weights of the columns.
        scale_prompt: False leaves the current prompt unscaled.
        newest_first: put the current prompt before the queue.

    Returns:
        [s + q + l, d].
    """
    split = queue_rows.shape[0]
    old = scale_rows(queue_rows, u[:split], v)
    new = scale_rows(prompt, u[split:], v) if scale_prompt else prompt
    return torch.cat([shared_prefix, new, old] if newest_first else [shared_prefix, old, new])
