"""Passes of a model in training as CUDA graphs: all kernels of a layer stack are launched at once, forward and back.

Training a small model is thousands of small kernels, and they take their time to launch one by one. The first pass of
a shape runs as it is, which warms up what it needs; the second is recorded, and every later one is a replay on new
inputs. What a method does around it (losses, memories, penalties, the optimiser) is free to be anything.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from qtuning.backbones.reading import Batch
from qtuning.errors import in_a_line
from qtuning.graphs import record
from qtuning.tensors import cut_like

UNIT = 32
"""Positions by which recorded passes differ at least: texts are of many lengths, and each takes a recording."""
MOST = 256
"""Recordings of one model; other shapes run as they are."""
NAMES = [field.name for field in fields(Batch)]
"""Tensors of a batch."""

Read = Callable[[Batch], Tensor]
"""Batch -> states [b, s, h]."""


class RecordedPasses:
    """Stands in for `Backbone.text_states` of a model in training.

    `weights` are those of its own that are trained in place: none where only a prompt is.
    """

    _open: ClassVar[weakref.ref[_Open] | None] = None
    """The pass whose backward pass is to come; of all models, because their recordings share memory."""

    def __init__(self, weights: Sequence[Tensor], most_positions: int):
        self.weights, self.most_positions = list(weights), most_positions
        self.is_on = False
        """Whether passes are recorded and replayed now."""
        self.may_record = True
        """False after a recording failed."""
        self._seen: set[tuple[int, ...]] = set()
        self._passes: dict[tuple[int, ...], _Pass] = {}
        self._gradients: list[Tensor] = []

    def takes(self, batch: Batch) -> bool:
        """Whether this pass may be one of them.

        Recordings share memory, so that none may begin while another one's backward pass is to come.
        """
        is_trained = torch.is_grad_enabled() and batch.inputs_embeds.requires_grad
        before = RecordedPasses._open
        is_free = before is None or before() is None
        inside = batch.inputs_embeds.is_cuda and torch.cuda.is_current_stream_capturing()
        return self.is_on and self.may_record and is_trained and is_free and not inside

    def __call__(self, read: Read, batch: Batch) -> Tensor:
        """States [b, s, h] of a batch, computed by `read` or by a replay of it."""
        rows, width = batch.is_filled.shape
        room = min(-(-width // UNIT) * UNIT, max(width, self.most_positions)) - width
        wide = replace(
            batch,
            inputs_embeds=F.pad(batch.inputs_embeds, (0, 0, 0, room)),
            is_filled=F.pad(batch.is_filled, (0, room)),
            is_text=F.pad(batch.is_text, (0, room)),
            token_types=F.pad(batch.token_types, (0, room)),
        )
        key = (rows, width + room)
        if key not in self._seen or (key not in self._passes and len(self._passes) >= MOST):
            first = read(wide)[:, :width]
            # not before it went back, too: only then everything is warm
            first.register_hook(lambda gradient: self._seen.add(key))  # type: ignore[no-untyped-call]
            return first
        if key not in self._passes:
            try:
                self._passes[key] = _Pass(read, wide, self.weights, self._shared_gradients())
            except RuntimeError as error:
                self.may_record, said = False, in_a_line(error)
                warnings.warn(f"Training goes on without CUDA graphs ({said}).", stacklevel=2)
                return read(wide)[:, :width]
        token = _Open()
        RecordedPasses._open = weakref.ref(token)
        own = self._passes[key]
        own.take(wide)
        states: Tensor = _Replay.apply(own, token, wide.inputs_embeds, *self.weights)  # type: ignore[no-untyped-call]
        return states[:, :width]

    def _shared_gradients(self) -> list[Tensor]:
        """Of all weights, as parts of one tensor: copied at once when they are handed on."""
        if not self._gradients:
            torch.cuda.empty_cache()  # what passes needed so far, recordings cannot take over
            sizes = [weight.numel() for weight in self.weights]
            like = self.weights[0] if self.weights else torch.empty(0)
            flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
            self._gradients = [flat, *cut_like(flat, self.weights)]
        return self._gradients


class _Open:
    """Lives from a forward pass until its backward pass is taken or given up."""


class _Pass:
    """The recorded forward and backward pass of one shape."""

    states: Tensor
    """[b, s, h] of the last pass; written again by every replay."""

    def __init__(self, read: Read, batch: Batch, weights: Sequence[Tensor], shared: list[Tensor]):
        self.weights, self.shared = weights, shared
        self.batch = Batch(**{name: getattr(batch, name).detach().clone() for name in NAMES})
        self.batch.inputs_embeds.requires_grad_()
        device = batch.is_filled.device
        self.forward = record(partial(self._forward, read), device)
        self.gradient = torch.zeros_like(self.states)
        self.into_embeds = torch.zeros_like(self.batch.inputs_embeds)
        self.is_used: list[bool] = []
        self.backward = record(self._backward, device)
        self.states = self.states.detach()  # lets go of the graph that was recorded

    def _forward(self, read: Read) -> None:
        """Recorded; `read` is not kept on a card, or the model would wait for the garbage collector at its end."""
        with torch.enable_grad():
            self.states = read(self.batch)

    def _backward(self) -> None:
        inputs = [self.batch.inputs_embeds, *self.weights]
        embeds, *found = torch.autograd.grad(self.states, inputs, self.gradient, allow_unused=True)
        self.is_used = [each is not None for each in found]
        self.into_embeds.copy_(embeds)
        into = [part for part, used in zip(self.shared[1:], self.is_used, strict=True) if used]
        if into:  # it takes no empty list
            torch._foreach_copy_(into, [each for each in found if each is not None])

    @torch.no_grad()
    def take(self, batch: Batch) -> None:
        """What is read next."""
        for name in NAMES:
            getattr(self.batch, name).copy_(getattr(batch, name))


class _Replay(torch.autograd.Function):
    """A recorded pass as one operation; what it gives is copied, because the next replay writes there again."""

    @staticmethod
    def forward(ctx: Any, own: _Pass, token: _Open, embeds: Tensor, *weights: Tensor) -> Tensor:
        """States [b, s, h]."""
        ctx.own, ctx.token = own, token
        own.forward()
        return own.states.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Gradients of the embeddings and of all weights."""
        own: _Pass = ctx.own
        if ctx.token is None:
            raise RuntimeError("a recorded pass can be taken back once only")
        own.gradient.copy_(gradient)
        own.backward()
        ctx.token = None
        flat = own.shared[0].clone()
        parts = zip(cut_like(flat, own.weights), own.is_used, strict=True)
        return None, None, own.into_embeds.clone(), *(p if used else None for p, used in parts)
