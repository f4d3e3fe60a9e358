"""Compiled layers: one compilation serves every layer of like shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

MOST_SHAPES = 64


def repeated_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model's stacks: members of its lists of like modules."""
    found: list[torch.nn.Module] = []
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len({type(layer) for layer in module}) == 1:
            inside = any(layer is other for layer in module for other in found)
            found += [] if inside else list(module)
    inner = {id(m) for layer in found for m in layer.modules() if m is not layer}
    return [layer for layer in found if id(layer) not in inner]


class CompiledLayers:
    """The layers of a model as they were and compiled, ready to change places."""

    def __init__(self, model: torch.nn.Module):
        self.layers = repeated_layers(model)
        self._made: dict[bool, list[Any]] = {}
        """By whether they are for any shape; making them again would cost more than a pass."""

    @contextmanager
    def in_place(self, dynamic: bool) -> Iterator[None]:
        """Inside, the layers run compiled, for fixed shapes or for any; outside, they are what they were."""
        before = [layer._compiled_call_impl for layer in self.layers]
        try:
            if dynamic not in self._made:
                for layer in self.layers:
                    layer.compile(dynamic=dynamic)
                self._made[dynamic] = [layer._compiled_call_impl for layer in self.layers]
            self._put(self._made[dynamic])
            with many_shapes():
                yield
        finally:
            self._put(before)

    def _put(self, calls: Sequence[Any]) -> None:
        for layer, call in zip(self.layers, calls, strict=True):
            layer._compiled_call_impl = call


def many_shapes() -> Any:
    """A context in which a function may be compiled for more shapes than torch allows by itself."""
    return torch._dynamo.config.patch(recompile_limit=MOST_SHAPES)
