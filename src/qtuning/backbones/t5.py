"""T5's layers as functions of tensors, arranged for what prompt tuning does with them.

The numbers are those of `transformers` (a test compares them); four things differ in how they come about:
- the relative bias and the padding mask are added up once and serve every layer;
- cross-attention is absorbed: the decoder reads one or two positions, so its queries are carried over to
  the encoder's states, which spares projecting every state to keys and values in every layer;
- ReLU and, where no gradient is wanted, the residual sum are done by the matrix products' own kernels;
- a layer takes its weights as arguments, so that one compiled function serves all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qtuning.backbones.base import MASKED
from qtuning.backbones.compiled import many_shapes
from qtuning.backbones.kernels import add_linear, linear_relu

MODEL_TYPES = ("t5", "mt5")
FASTEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Attention kernels in the order of preference: with a bias, cuDNN's is fastest by far (docs/performance.md)."""
Weights = tuple[Tensor, ...]
LayerFunction = Callable[..., Tensor]


class T5Layers:
    """Encoder and decoder of one T5 model, by reference to its weights."""

    def __init__(self, model: Any):
        encoder, decoder, config = model.get_encoder(), model.get_decoder(), model.config
        self.heads, self.eps = config.num_heads, config.layer_norm_epsilon
        self.act = encoder.block[0].layer[-1].DenseReluDense.act
        self.embed = decoder.get_input_embeddings()
        self._bias = [
            stack.block[0].layer[0].SelfAttention.compute_bias for stack in (encoder, decoder)
        ]
        self.encoder = [(_attention(b.layer[0]), _feed_forward(b.layer[1])) for b in encoder.block]
        self.decoder = [
            (_attention(b.layer[0]), _attention(b.layer[1]), _feed_forward(b.layer[2]))
            for b in decoder.block
        ]
        self.norms = encoder.final_layer_norm.weight, decoder.final_layer_norm.weight
        self.encoder_layer: LayerFunction = encoder_layer
        self.decoder_layer: LayerFunction = decoder_layer

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Inside, layers run compiled, for fixed shapes."""
        self.encoder_layer, self.decoder_layer = _compiled(encoder_layer), _compiled(decoder_layer)
        try:
            with many_shapes():
                yield
        finally:
            self.encoder_layer, self.decoder_layer = encoder_layer, decoder_layer

    def encode(self, embeds: Tensor, is_filled: Tensor) -> Tensor:
        """Embeddings [b, s, d] and whether a position counts [b, s] -> states [b, s, d].

        Without a gradient, the embeddings are overwritten.
        """
        size = embeds.shape[1]
        hidden = torch.where(is_filled, 0.0, MASKED).to(embeds.dtype)[:, None, None]
        bias = self._bias[0](size, size, device=embeds.device).to(embeds.dtype)
        mask = (
            bias.contiguous() + hidden
        )  # as made its last dimension is not, and no fused kernel takes it
        states = embeds
        for attention, feed_forward in self.encoder:
            states = self.encoder_layer(
                states, mask, attention, feed_forward, self.heads, self.eps, self.act
            )
        return norm(states, self.norms[0], self.eps)

    def decode(self, ids: Tensor, encoded: Tensor, is_filled: Tensor) -> Tensor:
        """Decoder input [p, t], encoder states [n, s, d] and which count [n, s] -> states [p, t, d].

        The paths of a row follow one another, equally many for each. A position sees only those before
        it, so padding on the right needs no mask.
        """
        states: Tensor = self.embed(ids)
        size = ids.shape[1]
        later = torch.ones(size, size, device=ids.device).triu(1) * MASKED
        bias = self._bias[1](size, size, device=ids.device) + later
        mask = torch.where(is_filled, 0.0, MASKED)[:, None]
        for own, cross, feed_forward in self.decoder:
            states = self.decoder_layer(
                states, encoded, bias.to(states.dtype), mask.to(states.dtype), own, cross, feed_forward,
                self.heads, self.eps, self.act,
            )  # fmt: skip
        return norm(states, self.norms[1], self.eps)


@cache
def _compiled(function: LayerFunction) -> LayerFunction:
    return torch.compile(function, dynamic=False)


def _attention(layer: Any) -> Weights:
    """Norm, q, k, v, o."""
    module = getattr(layer, "SelfAttention", None) or layer.EncDecAttention
    linears = (module.q, module.k, module.v, module.o)
    return (layer.layer_norm.weight, *(linear.weight for linear in linears))


def _feed_forward(layer: Any) -> Weights:
    """Norm, out, in, and the gate where there is one."""
    module = layer.DenseReluDense
    inner = (module.wi_0, module.wi_1) if hasattr(module, "wi_0") else (module.wi,)
    return (layer.layer_norm.weight, module.wo.weight, *(linear.weight for linear in inner))


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm."""
    return F.rms_norm(states, weight.shape, weight, eps)


def encoder_layer(
    states: Tensor,
    mask: Tensor,
    attention: Weights,
    feed_forward: Weights,
    heads: int,
    eps: float,
    act: Callable[[Tensor], Tensor],
) -> Tensor:
    """States [b, s, d], mask [b, heads, s, s] -> states [b, s, d]."""
    states = _self_attention(states, mask, attention, heads, eps, is_short=False)
    return _dense(states, feed_forward, eps, act)


def decoder_layer(
    states: Tensor,
    encoded: Tensor,
    bias: Tensor,
    mask: Tensor,
    own: Weights,
    cross: Weights,
    feed_forward: Weights,
    heads: int,
    eps: float,
    act: Callable[[Tensor], Tensor],
) -> Tensor:
    """States [p, t, d], encoded [n, s, d], bias [1, heads, t, t], mask [n, 1, s] -> states [p, t, d]."""
    states = _self_attention(states, bias, own, heads, eps, is_short=True)
    states = _absorbed_attention(states, encoded, mask, cross, heads, eps)
    return _dense(states, feed_forward, eps, act)


def _split(states: Tensor, weight: Tensor, heads: int) -> Tensor:
    """[b, s, d] -> [b, heads, s, k]."""
    projected = F.linear(states, weight)
    return projected.view(*projected.shape[:2], heads, -1).transpose(1, 2)


def _self_attention(
    states: Tensor, mask: Tensor, weights: Weights, heads: int, eps: float, *, is_short: bool
) -> Tensor:
    """States [b, s, d], mask [b or 1, heads, s, s] -> states [b, s, d]."""
    scale, q, k, v, o = weights
    normed = norm(states, scale, eps)
    query, key, value = (_split(normed, weight, heads) for weight in (q, k, v))
    # fused kernels do not take a few positions, and on a CPU are slower than two products in bfloat16
    if is_short or (states.device.type == "cpu" and states.dtype == torch.bfloat16):
        scores = query @ key.transpose(2, 3) + mask
        found = torch.softmax(scores, dim=-1, dtype=_wide(scores)).to(states.dtype) @ value
    else:
        with sdpa_kernel(FASTEST, set_priority=True):
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0)
    return add_linear(states, found.transpose(1, 2).flatten(2), o)


def _absorbed_attention(
    states: Tensor, encoded: Tensor, mask: Tensor, weights: Weights, heads: int, eps: float
) -> Tensor:
    """Cross-attention of few positions: (W_k x) . q = x . (W_k^T q), and sum p W_v x = W_v (sum p x).

    All paths of a row look at its states [s, d] in one product.
    """
    scale, q, k, v, o = weights
    count, steps, dim = states.shape
    query = F.linear(norm(states, scale, eps), q).view(count * steps, heads, -1).transpose(0, 1)
    key, value = (weight.view(heads, -1, dim) for weight in (k, v))  # [heads, k, d]
    carried = (query @ key).transpose(0, 1).reshape(len(encoded), -1, dim)
    scores = carried @ encoded.transpose(1, 2) + mask
    share = torch.softmax(scores, dim=-1, dtype=_wide(scores)).to(states.dtype)
    context = (share @ encoded).view(count * steps, heads, dim).transpose(0, 1)
    found = (context @ value.transpose(1, 2)).transpose(0, 1).reshape(count, steps, -1)
    return add_linear(states, found, o)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _dense(states: Tensor, weights: Weights, eps: float, act: Callable[[Tensor], Tensor]) -> Tensor:
    scale, out, *inner = weights
    normed = norm(states, scale, eps)
    if isinstance(act, torch.nn.ReLU) and len(inner) == 1:
        hidden = linear_relu(normed.flatten(0, 1), inner[0]).view(*states.shape[:2], -1)
    else:
        hidden = act(F.linear(normed, inner[0]))
    if len(inner) > 1:
        hidden = hidden * F.linear(normed, inner[1])
    return add_linear(states, hidden, out)
