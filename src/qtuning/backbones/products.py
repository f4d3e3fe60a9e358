"""Attention whose gradient is made of matrix products: on a CPU in half precision torch's own takes far longer.

In single precision torch's own is the quicker. Values are torch's either way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

QUICK = "qtuning-quick"
"""An attention for which `transformers` makes no mask: its own function, without a mask function beside it."""


def attend_quickly(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[b, heads, s, d] -> [b, s, heads, d], as a layer of `transformers` asks for it."""
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        states = [_as_computed(each) for each in (query, key, value)]
        if has_slow_gradient(states[0]) and _is_plain(module, attention_mask, **options):
            mask = None if attention_mask is None else attention_mask.to(states[0].dtype)
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            out: Tensor = ByProducts.apply(*states, mask, scale)  # type: ignore[no-untyped-call]
            return out.transpose(1, 2).contiguous(), None
    found: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **options
    )
    return found


def _is_plain(
    module: Any,
    mask: Tensor | None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> bool:
    """Whether it is no more than products, a mask that is added or a causal one, and a softmax."""
    if mask is None:
        is_known = getattr(module, "is_causal", True) if is_causal is None else is_causal
    else:
        is_known = mask.is_floating_point()
    return bool(is_known) and not dropout and position_bias is None


AttentionInterface.register(QUICK, attend_quickly)


def has_slow_gradient(query: Tensor) -> bool:
    """Whether torch's own gradient of attention is to be avoided."""
    return query.device.type == "cpu" and query.requires_grad and query.itemsize < 4


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """[n, heads, q, d] of keys and values [n, shared heads, k, d]; without a mask a position sees those so far."""
    is_shared = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=is_shared
    )


class ByProducts(torch.autograd.Function):
    """`attention`, with all its weights in memory for the gradient of one layer at a time."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Of what `attention` takes."""
        *tensors, ctx.scale = inputs
        out = attention(*inputs)
        ctx.save_for_backward(*tensors, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """With weights P = softmax(S) and out = P V: dV = P^T dO, dS = P (dO V^T - rows of dO out)."""
        query, key, value, mask, out = ctx.saved_tensors
        n, shared, seen, _ = key.shape
        # heads that share keys stand below each other
        asked, above, found = (
            each.reshape(n, shared, -1, each.shape[-1])
            for each in (query * ctx.scale, gradient, out)
        )
        scores = (asked @ key.transpose(-1, -2)).view(n, shared, -1, query.shape[2], seen)
        seen_by = _earlier(query.shape[2], seen, query.dtype) if mask is None else mask
        weights = scores.add_(seen_by[:, :, None]).softmax(dim=-1).view(n, shared, -1, seen)
        to_value = weights.transpose(-1, -2) @ above
        to_scores = above @ value.transpose(-1, -2)
        to_scores.sub_((above * found).sum(dim=-1, keepdim=True)).mul_(weights)
        to_query = (to_scores @ key).mul_(ctx.scale).view_as(query)
        return to_query, to_scores.transpose(-1, -2) @ asked, to_value, None, None


def _earlier(queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """[1, 1, q, k] 0 where a position sees itself or an earlier one, else -inf."""
    return torch.full((1, 1, queries, keys), -torch.inf, dtype=dtype).triu_(1)


def _as_computed(states: Tensor) -> Tensor:
    """In the number type that attention would be computed in: weights in training leave that to autocast."""
    is_left = torch.is_autocast_enabled("cpu")
    return states.to(torch.get_autocast_dtype("cpu")) if is_left else states
