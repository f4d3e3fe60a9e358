"""Attention over the parts of a line on a card, in Triton: no copies of what many parts see, no padding, no atomics.

A program works on one tile of a part. What stands before the part, its prompt and where there are several paths its
text, is seen whole; the part itself causally. Backwards, the keys of a prompt gather from the positions of all of its
texts, which stand together, so that every sum has a fixed order.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped,import-not-found"
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtuning.backbones.extents import TILE

STAGES = 1
"""Loads ahead of the loop: parts are short, so more programs at a time are worth more than these."""
LOG2E = tl.constexpr(1.4426950408889634)
"""Exponentials of 2 are what the card computes."""


@triton.jit
def _tile(at, first_row, last, head, stride, head_stride, tile: tl.constexpr, width: tl.constexpr):
    """[tile, width] of positions from `first_row` on; 0 from `last` on."""
    rows = first_row + tl.arange(0, tile)
    columns = tl.arange(0, width)
    place = at + rows[:, None].to(tl.int64) * stride + head * head_stride + columns[None, :]
    return tl.load(place, mask=rows[:, None] < last, other=0.0)


@triton.jit
def _put(at, value, first_row, last, head, heads, tile: tl.constexpr, width: tl.constexpr):
    rows = first_row + tl.arange(0, tile)
    columns = tl.arange(0, width)
    place = at + (rows[:, None].to(tl.int64) * heads + head) * width + columns[None, :]
    tl.store(place, value.to(at.dtype.element_ty), mask=rows[:, None] < last)


@triton.jit
def _look(
    found, most, total, query, rows, key, value, first, last, shared, key_stride, key_head, value_stride, value_head,
    scale, is_own: tl.constexpr, tile: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """The running softmax of queries over keys `first` to `last`; of the part's own only those up to each row."""
    for at in range(first, last, tile):
        keys = at + tl.arange(0, tile)
        k = _tile(key, at, last, shared, key_stride, key_head, tile, width)
        v = _tile(value, at, last, shared, value_stride, value_head, tile, width)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        is_seen = keys[None, :] < last
        if is_own:
            is_seen = is_seen & (keys[None, :] <= rows[:, None])
        scores = tl.where(is_seen, scores, -1e30)
        new = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        old = tl.exp2(most - new)
        total = total * old + tl.sum(weights, 1)
        found = found * old[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        most = new
    return found, most, total


@triton.jit
def _forward(
    query, key, value, out, sums, starts, before, tiles, scale, positions, query_stride, query_head, key_stride,
    key_head, value_stride, value_head, heads: tl.constexpr, group: tl.constexpr, tile: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    part = tl.load(tiles + 2 * tl.program_id(0))
    if part >= 0:
        head = tl.program_id(1)
        start, last = tl.load(starts + part), tl.load(starts + part + 1)
        first = start + tl.load(tiles + 2 * tl.program_id(0) + 1)
        rows = first + tl.arange(0, tile)
        q = _tile(query, first, last, head, query_stride, query_head, tile, width)
        found = tl.zeros([tile, width], dtype=tl.float32)
        most = tl.full([tile], -1e30, dtype=tl.float32)
        total = tl.zeros([tile], dtype=tl.float32)
        for level in tl.static_range(2):
            other = tl.load(before + 2 * part + level)
            if other >= 0:
                found, most, total = _look(
                    found, most, total, q, rows, key, value, tl.load(starts + other), tl.load(starts + other + 1),
                    head // group, key_stride, key_head, value_stride, value_head, scale * LOG2E, False, tile, width,
                )  # fmt: skip
        found, most, total = _look(
            found, most, total, q, rows, key, value, start, tl.minimum(first + tile, last), head // group,
            key_stride, key_head, value_stride, value_head, scale * LOG2E, True, tile, width,
        )  # fmt: skip
        _put(out, found / total[:, None], first, last, head, heads, tile, width)
        tl.store(sums + head * positions + rows, most + tl.log2(total), mask=rows < last)


@triton.jit
def _look_back(
    back, query, gradient, sum_, delta, rows, key, value, first, last, shared, key_stride, key_head, value_stride,
    value_head, scale, is_own: tl.constexpr, tile: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """What queries get from keys `first` to `last`."""
    for at in range(first, last, tile):
        keys = at + tl.arange(0, tile)
        k = _tile(key, at, last, shared, key_stride, key_head, tile, width)
        v = _tile(value, at, last, shared, value_stride, value_head, tile, width)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        is_seen = keys[None, :] < last
        if is_own:
            is_seen = is_seen & (keys[None, :] <= rows[:, None])
        weights = tl.where(is_seen, tl.exp2(scores - sum_[:, None]), 0.0)
        to_weights = tl.dot(gradient, tl.trans(v), input_precision="ieee")
        to_scores = weights * (to_weights - delta[:, None])
        back += tl.dot(to_scores.to(k.dtype), k, input_precision="ieee")
    return back


@triton.jit
def _to_query(
    gradient, query, key, value, out, sums, deltas, to_query, starts, before, tiles, scale, positions,
    gradient_stride, gradient_head, query_stride, query_head, key_stride, key_head, value_stride, value_head,
    heads: tl.constexpr, group: tl.constexpr, tile: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    part = tl.load(tiles + 2 * tl.program_id(0))
    if part >= 0:
        head = tl.program_id(1)
        start, last = tl.load(starts + part), tl.load(starts + part + 1)
        first = start + tl.load(tiles + 2 * tl.program_id(0) + 1)
        rows = first + tl.arange(0, tile)
        q = _tile(query, first, last, head, query_stride, query_head, tile, width)
        g = _tile(gradient, first, last, head, gradient_stride, gradient_head, tile, width)
        o = _tile(out, first, last, head, heads * width, width, tile, width)
        delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
        tl.store(deltas + head * positions + rows, delta, mask=rows < last)
        sum_ = tl.load(sums + head * positions + rows, mask=rows < last, other=0.0)
        back = tl.zeros([tile, width], dtype=tl.float32)
        for level in tl.static_range(2):
            other = tl.load(before + 2 * part + level)
            if other >= 0:
                back = _look_back(
                    back, q, g, sum_, delta, rows, key, value, tl.load(starts + other), tl.load(starts + other + 1),
                    head // group, key_stride, key_head, value_stride, value_head, scale, False, tile, width,
                )  # fmt: skip
        back = _look_back(
            back, q, g, sum_, delta, rows, key, value, start, tl.minimum(first + tile, last), head // group,
            key_stride, key_head, value_stride, value_head, scale, True, tile, width,
        )  # fmt: skip
        _put(to_query, back * scale, first, last, head, heads, tile, width)


@triton.jit
def _seen_from(
    to_key, to_value, k, v, keys, query, gradient, sums, deltas, first, last, head, positions, query_stride,
    query_head, gradient_stride, gradient_head, scale, is_own: tl.constexpr, tile: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """What keys get from queries `first` to `last`."""
    for at in range(first, last, tile):
        rows = at + tl.arange(0, tile)
        q = _tile(query, at, last, head, query_stride, query_head, tile, width)
        g = _tile(gradient, at, last, head, gradient_stride, gradient_head, tile, width)
        sum_ = tl.load(sums + head * positions + rows, mask=rows < last, other=0.0)
        delta = tl.load(deltas + head * positions + rows, mask=rows < last, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E)
        is_seen = rows[None, :] < last
        if is_own:
            is_seen = is_seen & (keys[:, None] <= rows[None, :])
        weights = tl.where(is_seen, tl.exp2(scores - sum_[None, :]), 0.0)
        to_value += tl.dot(weights.to(g.dtype), g, input_precision="ieee")
        to_weights = tl.dot(v, tl.trans(g), input_precision="ieee")
        to_scores = weights * (to_weights - delta[None, :])
        to_key += tl.dot(to_scores.to(q.dtype), q, input_precision="ieee")
    return to_key, to_value


@triton.jit
def _to_key_and_value(
    gradient, query, key, value, sums, deltas, to_key, to_value, starts, seen_by, tiles, scale, positions,
    gradient_stride, gradient_head, query_stride, query_head, key_stride, key_head, value_stride, value_head,
    heads: tl.constexpr, group: tl.constexpr, tile: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    part = tl.load(tiles + 2 * tl.program_id(0))
    if part >= 0:
        shared = tl.program_id(1)
        last = tl.load(starts + part + 1)
        first = tl.load(starts + part) + tl.load(tiles + 2 * tl.program_id(0) + 1)
        keys = first + tl.arange(0, tile)
        k = _tile(key, first, last, shared, key_stride, key_head, tile, width)
        v = _tile(value, first, last, shared, value_stride, value_head, tile, width)
        back_key = tl.zeros([tile, width], dtype=tl.float32)
        back_value = tl.zeros([tile, width], dtype=tl.float32)
        others_first, others_last = tl.load(seen_by + 2 * part), tl.load(seen_by + 2 * part + 1)
        for i in range(group):
            head = shared * group + i
            back_key, back_value = _seen_from(
                back_key, back_value, k, v, keys, query, gradient, sums, deltas, first, last, head, positions,
                query_stride, query_head, gradient_stride, gradient_head, scale, True, tile, width,
            )  # fmt: skip
            back_key, back_value = _seen_from(
                back_key, back_value, k, v, keys, query, gradient, sums, deltas, others_first, others_last, head,
                positions, query_stride, query_head, gradient_stride, gradient_head, scale, False, tile, width,
            )  # fmt: skip
        _put(to_key, back_key * scale, first, last, shared, heads // group, tile, width)
        _put(to_value, back_value, first, last, shared, heads // group, tile, width)


def forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, before: Tensor, tiles: Tensor, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[s, heads, d], and the logarithm (base 2) of each query's sum [heads, s]; see `attend`."""
    positions, heads, width = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sums = torch.empty(heads, positions, dtype=torch.float32, device=query.device)
    with _there(query):
        _forward[(len(tiles), heads)](
            query, key, value, out, sums, starts, before, tiles, scale, positions, *query.stride()[:2],
            *key.stride()[:2], *value.stride()[:2], heads, heads // key.shape[1], TILE, width, num_stages=STAGES,
        )  # fmt: skip
    return out, sums


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, starts: Tensor,
    before: Tensor, seen_by: Tensor, tiles: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    positions, heads, width = query.shape
    back = [
        torch.empty(each.shape, dtype=each.dtype, device=each.device)
        for each in (query, key, value)
    ]
    deltas = torch.empty_like(sums)
    strides = [n for each in (gradient, query, key, value) for n in each.stride()[:2]]
    sizes = (heads, heads // key.shape[1], TILE, width)
    with _there(query):
        _to_query[(len(tiles), heads)](
            gradient, query, key, value, out, sums, deltas, back[0], starts, before, tiles, scale, positions,
            *strides, *sizes, num_stages=STAGES,
        )  # fmt: skip
        _to_key_and_value[(len(tiles), key.shape[1])](
            gradient, query, key, value, sums, deltas, back[1], back[2], starts, seen_by, tiles, scale, positions,
            *strides, *sizes, num_stages=STAGES,
        )  # fmt: skip
    return back[0], back[1], back[2]


def _there(tensor: Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the current card, whichever their tensors are on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
