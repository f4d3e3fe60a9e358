"""Attention for parts of a line, each with keys of its own choice: one operation, and its gradient.

Kernels for rows of any length want the keys of each row one behind another. Here many rows see the same keys, so these
are copied out for each, and what comes back for the copies is summed in a fixed order. The copies are made again
for the gradient rather than kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("qtuning::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, seen: Tensor, owned: Tensor,
    used: Tensor, longest: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[s, heads, d] -> the same, and what the gradient needs; see `lines.Line` for the rest.

    Args:
        query: [s, heads, d].
        key: [s, shared heads, d].
        value: [s, shared heads, d].
        starts: [m + 1] where the parts' queries begin.
        key_starts: [m + 1] where their keys begin among those of all parts; a part's own are the last of them.
        seen: [keys] positions whose keys they are.
        owned: [s] where a position's keys are among those, seen by its own part.
        used: [p, n] where else the first p positions are.
        longest: Positions that a part sees, at most.
        scale: Of the products.
    """
    key, value = key[seen], value[seen]
    if query.device.type == "cpu":
        return _part_by_part(query, key, value, starts, key_starts, scale), query.new_zeros(0)
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, key_starts, longest, longest, 0.0, True, False, scale=scale
    )
    return found[0].contiguous(), found[1]


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    size = (query.shape[1], query.shape[0]) if query.device.type != "cpu" else (0,)
    return _like(query), query.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("qtuning::attend_back", mutates_args=())
def attend_back(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Tensor, sums: Tensor, starts: Tensor,
    key_starts: Tensor, seen: Tensor, owned: Tensor, used: Tensor, longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    key, value = key[seen], value[seen]
    if query.device.type == "cpu":
        to_query, to_key, to_value = _back_part_by_part(
            gradient, query, key, value, starts, key_starts, scale
        )
    else:
        nothing = torch.zeros(2, dtype=torch.uint64, device=query.device)  # no dropout, no seed
        to_query, to_key, to_value = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(), query, key, value, found, sums, starts, key_starts, longest, longest,
            0.0, True, nothing, nothing[:0], scale=scale,
        )  # fmt: skip
    return (
        to_query.contiguous(),
        given_back(to_key, owned, used),
        given_back(to_value, owned, used),
    )


@attend_back.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:  # fmt: skip
    return _like(query), _like(key), _like(value)


def given_back(copies: Tensor, owned: Tensor, used: Tensor) -> Tensor:
    """Gradients [keys, ...] of the copies, summed for the positions that they are copies of: [s, ...]."""
    own = copies[owned]
    if not used.numel():
        return own
    shared = own[: len(used)].float() if own.dtype.itemsize < 4 else own[: len(used)]
    others = copies[used].sum(dim=1, dtype=shared.dtype)
    return torch.cat([(shared + others).to(own), own[len(used) :]])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    query, key, value, *where, found, sums = ctx.saved_tensors
    back = attend_back(
        gradient, query, key, value, found, sums, *where, ctx.longest, ctx.scale
    )  # fmt: skip
    return *back, *[None] * 7


attend.register_autograd(_backward, setup_context=_remember)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _parts(starts: Tensor, key_starts: Tensor) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of every part."""
    for own in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        yield slice(*own[0]), slice(*own[1])


def _weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """[heads, q, k]: softmax over what each query may see, the last queries and keys being of the same positions."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    is_seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
    return scores.where(is_seen, -torch.inf).softmax(dim=-1)


def _part_by_part(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, scale: float
) -> Tensor:
    """Where there is no kernel for it; slow. Positions after the last part are 0."""
    heads = query.shape[1] // key.shape[1]
    found = torch.zeros_like(query)
    for q, k in _parts(starts, key_starts):
        keys, values = (each[k].repeat_interleave(heads, dim=1) for each in (key, value))
        found[q] = torch.einsum("hqk,khd->qhd", _weights(query[q], keys, scale), values)
    return found


def _back_part_by_part(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of that, by hand: nothing differentiates inside an operation."""
    shared = key.shape[1]
    heads = query.shape[1] // shared
    back = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for q, k in _parts(starts, key_starts):
        keys, values = (each[k].repeat_interleave(heads, dim=1) for each in (key, value))
        weights = _weights(query[q], keys, scale)
        to_weights = torch.einsum("qhd,khd->hqk", gradient[q], values)
        inside = (to_weights * weights).sum(dim=-1, keepdim=True)
        to_scores = scale * weights * (to_weights - inside)
        back[0][q] = torch.einsum("hqk,khd->qhd", to_scores, keys)
        to_keys = torch.einsum("hqk,qhd->khd", to_scores, query[q])
        to_values = torch.einsum("hqk,qhd->khd", weights, gradient[q])
        for whole, own in zip(back[1:], (to_keys, to_values), strict=True):
            whole[k] = own.view(len(own), shared, heads, -1).sum(dim=2)
    return back


@lru_cache
def kernel_works(
    device: torch.device, dtype: torch.dtype, heads: int, shared: int, width: int
) -> bool:
    """Whether two texts behind one prompt give there what they give part by part, gradients too."""
    starts = torch.tensor([0, 5, 8, 20], dtype=torch.int32)
    key_starts = torch.tensor([0, 5, 13, 30], dtype=torch.int32)
    prompt, tail = list(range(5)), [0, 0]
    seen = torch.tensor([*prompt, *prompt, 5, 6, 7, *prompt, *range(8, 20), *tail])
    owned = torch.tensor([*prompt, 10, 11, 12, *range(18, 30), *tail])
    used = torch.tensor([[5 + i, 13 + i] for i in prompt])
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(22, each, width, generator=draw) for each in (heads, shared, shared)]

    def found(where: torch.device, kind: torch.dtype) -> list[Tensor]:
        own = [states.to(where, kind).requires_grad_() for states in drawn]
        sizes = [each.to(where) for each in (starts, key_starts, seen, owned, used)]
        out = attend(own[0], own[1], own[2], *sizes, 32, width**-0.5)[0][:20]
        back = torch.autograd.grad(out.square().sum(), own)
        return [t.float().cpu() for t in (out, *(each[:20] for each in back))]

    try:
        with torch.enable_grad():
            there, here = found(device, dtype), found(torch.device("cpu"), torch.float32)
        return all(torch.allclose(a, b, 0.1, 0.1) for a, b in zip(there, here, strict=True))
    except (RuntimeError, NotImplementedError):
        return False
