"""Compiled layers: one compilation serves every layer of like shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def compiled(layers: list[torch.nn.Module], dynamic: bool = False) -> Iterator[None]:
    """Inside, these layers run compiled, for fixed shapes or for any; outside, they are what they were."""
    with many_shapes(), ExitStack() as undo:
        for layer in layers:
            undo.callback(setattr, layer, "_compiled_call_impl", layer._compiled_call_impl)
            layer.compile(dynamic=dynamic)  # cheap: what was compiled before is found again
        yield


def many_shapes() -> Any:
    """A context in which a function may be compiled for more shapes than torch allows by itself."""
    return torch._dynamo.config.patch(recompile_limit=MOST_SHAPES)
