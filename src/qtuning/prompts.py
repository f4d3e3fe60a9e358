"""Soft prompts, the residual MLP they may be trained through, and the rank-one scale.

The paper's symbols: a prompt is theta_P^i, the shared prefix theta_P*, the scale W^i = u_i (x) v_i^T,
the prompt length l, the embedding width d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


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


def make_mlp(
    dim: int, hidden: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Weights of a residual MLP for prompt rows of width `dim`."""
    weights: dict[str, Tensor] = {}
    for name, inner, outer in (("inner", dim, hidden), ("outer", hidden, dim)):
        bound = inner**-0.5
        for part, shape in (("weight", (outer, inner)), ("bias", (outer,))):
            drawn = torch.empty(shape, dtype=dtype).uniform_(-bound, bound, generator=generator)
            weights[f"{name}.{part}"] = drawn
    return weights


def residual_mlp(rows: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Prompt rows [..., n, d] -> rows + W2 relu(W1 rows), each row on its own.

    Paper: "two-layer residual MLP" (Fig. 1), hidden 512, ReLU (appendix).
    """
    hidden = torch.relu(rows @ weights["inner.weight"].mT + weights["inner.bias"][..., None, :])
    return rows + (hidden @ weights["outer.weight"].mT + weights["outer.bias"][..., None, :])


def scale_rows(rows: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """W o rows with W = u v^T: rows [..., n, d], u [..., n], v [..., d] -> [..., n, d].

    Paper: Eq. 3 and the text before it; n + d trained numbers instead of n * d.
    """
    return rows * u[..., :, None] * v[..., None, :]


def compose(
    shared_prefix: Tensor,
    queue_rows: Tensor,
    prompt: Tensor,
    u_queue: Tensor,
    u_prompt: Tensor,
    v: Tensor,
    *,
    scale_prompt: bool = True,
    newest_first: bool = False,
) -> Tensor:
    """The layout of one task, [theta*; W o (queue, prompt)]: what stands before its text.

    Paper: the conditioning of Eq. 8. Leading dimensions, if any, are lanes.

    Args:
        shared_prefix: [..., s, d], s may be 0.
        queue_rows: [..., q, d], in the order in which they stand in the sequence.
        prompt: [..., l, d], the current task's.
        u_queue: [..., q] weights of the queue's rows.
        u_prompt: [..., l] weights of the prompt's rows.
        v: [..., d] weights of the columns.
        scale_prompt: False leaves the current prompt unscaled.
        newest_first: put the current prompt before the queue.

    Returns:
        [..., s + q + l, d].
    """
    old = scale_rows(queue_rows, u_queue, v)
    new = scale_rows(prompt, u_prompt, v) if scale_prompt else prompt
    order = [shared_prefix, new, old] if newest_first else [shared_prefix, old, new]
    return torch.cat(order, dim=-2)
