"""Matrix products that do the next operation too, where torch has such kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op("qtuning::linear_relu", mutates_args=())
def linear_relu(states: Tensor, weight: Tensor) -> Tensor:
    """relu(W x) for states [n, d] and weight [k, d]; on a card the product's kernel ends with the ReLU.

    An operator of its own, because compilation would take the two apart again.
    """
    if states.device.type == "cpu":  # which has no such kernel
        return F.linear(states, weight).relu_()
    return torch._addmm_activation(weight.new_zeros(len(weight)), states, weight.t())


@linear_relu.register_fake
def _shape(states: Tensor, weight: Tensor) -> Tensor:
    return states.new_empty(len(states), len(weight))


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    states, weight = inputs
    ctx.save_for_backward(output, weight, states if ctx.needs_input_grad[1] else None)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    output, weight, states = ctx.saved_tensors
    inner = gradient.where(output > 0, 0)
    own = inner @ weight if ctx.needs_input_grad[0] else None
    return own, inner.t() @ states if ctx.needs_input_grad[1] else None


linear_relu.register_autograd(_backward, setup_context=_remember)


def add_linear(states: Tensor, inner: Tensor, weight: Tensor) -> Tensor:
    """States + W inner, for states [..., d], inner [..., k] and weight [d, k].

    Without a gradient the product is added in place, which takes no pass of its own; `states` is
    then overwritten.
    """
    if torch.is_grad_enabled():
        return states + F.linear(inner, weight)
    flat = inner.reshape(-1, inner.shape[-1])
    states.view(-1, states.shape[-1]).addmm_(flat, weight.t())
    return states
