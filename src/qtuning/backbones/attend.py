"""Attention over the parts of a line: one operation, and its gradient.

On a card by the kernels of `tree_kernel`. Elsewhere part by part: slow, and what those are checked against; a CPU reads
its lines by `beside`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qtuning.errors import in_a_line


@torch.library.custom_op("qtuning::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, before: Tensor, seen_by: Tensor, tiles: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[s, heads, d] -> the same, and what the gradient needs.

    Args:
        query: [s, heads, d]; numbers of a head stand together, here and in the next two.
        key: [s, shared heads, d].
        value: [s, shared heads, d].
        starts: [m + 1] where each part begins, and where the last one ends.
        before: [m, 2] parts that are seen whole from each part, -1 for none.
        seen_by: [m, 2] first and last (exclusive) of the positions after a part that see it; empty without gradients.
        tiles: [t, 2] part, and place in it, of every stretch of so many positions; part -1 for none.
        scale: Of the products.
    """
    if query.device.type == "cpu":
        none = torch.zeros(0, dtype=torch.float32)
        return _part_by_part(query, key, value, starts, before, scale), none
    from qtuning.backbones import tree_kernel

    return tree_kernel.forward(query, key, value, starts, before, tiles, scale)


@attend.register_fake
def _(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    size = (query.shape[1], query.shape[0]) if query.device.type != "cpu" else (0,)
    return _like(query), query.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("qtuning::attend_back", mutates_args=())
def attend_back(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Tensor, sums: Tensor, starts: Tensor,
    before: Tensor, seen_by: Tensor, tiles: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    if query.device.type == "cpu":
        return _back_part_by_part(gradient, query, key, value, starts, before, scale)
    from qtuning.backbones import tree_kernel

    return tree_kernel.backward(
        gradient, query, key, value, found, sums, starts, before, seen_by, tiles, scale
    )


@attend_back.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:  # fmt: skip
    return _like(query), _like(key), _like(value)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    query, key, value, *where, found, sums = ctx.saved_tensors
    back = attend_back(gradient, query, key, value, found, sums, *where, ctx.scale)
    return *back, *[None] * 5


attend.register_autograd(_backward, setup_context=_remember)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _parts(starts: Tensor, before: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Queries and keys of every part that is not empty; its own keys are the last."""
    edges = starts.tolist()
    for i, others in enumerate(before.tolist()):
        if edges[i] < edges[i + 1]:
            seen = [part for part in (*others, i) if part >= 0]
            keys = [k for part in seen for k in range(edges[part], edges[part + 1])]
            yield slice(edges[i], edges[i + 1]), torch.tensor(keys)


def _weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """[heads, q, k]: softmax over what each query may see, the last queries and keys being of the same positions."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    is_seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
    return scores.where(is_seen, -torch.inf).softmax(dim=-1)


def _part_by_part(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, before: Tensor, scale: float
) -> Tensor:
    """Where there is no kernel for it; slow. Positions after the last part are 0."""
    heads = query.shape[1] // key.shape[1]
    found = _like(query).zero_()
    for q, k in _parts(starts, before):
        keys, values = (each[k].repeat_interleave(heads, dim=1) for each in (key, value))
        found[q] = torch.einsum("hqk,khd->qhd", _weights(query[q], keys, scale), values)
    return found


def _back_part_by_part(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, before: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of that, by hand: nothing differentiates inside an operation."""
    shared = key.shape[1]
    heads = query.shape[1] // shared
    back = _like(query).zero_(), _like(key).zero_(), _like(value).zero_()
    for q, k in _parts(starts, before):
        keys, values = (each[k].repeat_interleave(heads, dim=1) for each in (key, value))
        weights = _weights(query[q], keys, scale)
        to_weights = torch.einsum("qhd,khd->hqk", gradient[q], values)
        inside = (to_weights * weights).sum(dim=-1, keepdim=True)
        to_scores = scale * weights * (to_weights - inside)
        back[0][q] = torch.einsum("hqk,khd->qhd", to_scores, keys)
        to_keys = torch.einsum("hqk,qhd->khd", to_scores, query[q])
        to_values = torch.einsum("hqk,qhd->khd", weights, gradient[q])
        for whole, own in zip(back[1:], (to_keys, to_values), strict=True):
            whole[k] += own.view(len(own), shared, heads, -1).sum(dim=2)
    return back


@lru_cache
def kernel_works(
    device: torch.device, dtype: torch.dtype, heads: int, shared: int, width: int
) -> bool:
    """Whether two texts behind one prompt, one of them longer than a tile, give there what they give part by part."""
    starts = torch.tensor([0, 5, 8, 80], dtype=torch.int32)
    before = torch.tensor([[-1, -1], [0, -1], [0, -1]], dtype=torch.int32)
    seen_by = torch.tensor([[5, 80], [0, 0], [0, 0]], dtype=torch.int32)
    tiles = torch.tensor([[0, 0], [1, 0], [2, 0], [2, 64], [-1, 0]], dtype=torch.int32)
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(90, each, width, generator=draw) for each in (heads, shared, shared)]

    def found(where: torch.device, kind: torch.dtype) -> list[Tensor]:
        own = [states.to(where, kind).requires_grad_() for states in drawn]
        sizes = [each.to(where) for each in (starts, before, seen_by, tiles)]
        out = attend(own[0], own[1], own[2], *sizes, width**-0.5)[0][:80]
        back = torch.autograd.grad(out.square().sum(), own)
        return [t.float().cpu() for t in (out, *(each[:80] for each in back))]

    try:
        with torch.enable_grad():
            there, here = found(device, dtype), found(torch.device("cpu"), torch.float32)
        return all(torch.allclose(a, b, 0.1, 0.1) for a, b in zip(there, here, strict=True))
    except torch.OutOfMemoryError:
        raise  # another time it may work
    except Exception as error:  # no compiler, no such card: whatever it is, rows are padded instead
        said = in_a_line(error)
        warnings.warn(f"no kernels for lines on {device} ({said}): rows are padded.", stacklevel=2)
        return False
