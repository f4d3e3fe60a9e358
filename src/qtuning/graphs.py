"""Steps as CUDA graphs: the whole step, optimiser included, is launched at once.

A step of one lane is hundreds of small kernels, and launching them one by one costs more than running
them. The first step of a shape runs as it is, which compiles and warms up what it needs; the second is
captured while it is recorded, and every later one is a replay on new inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from qtuning.stack import Batches

Widths = tuple[int, int]
"""Positions of a step's sequences, and of those of a second pass; 0 where there is none."""
Compute = Callable[[Sequence[Batches], Widths], Tensor]


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[Batches]
    losses: Tensor


def repeat(step: Callable[[], None], times: int, device: torch.device) -> None:
    """Take the same step so often, on tensors that it changes in place; on a card all but the first are replays."""
    if device.type != "cuda" or times < 4:
        for _ in range(times):
            step()
        return
    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    replay: Callable[[], None] = graph.replay
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:  # not every model can be captured; recording changed nothing
        replay = step
    for _ in range(times - 1):
        replay()
    torch.cuda.synchronize(device)  # before the graph and its memory go


class StepGraphs:
    """The captured steps of one pack, by the widths of their sequences; on a CPU, plain steps."""

    def __init__(self, compute: Compute, device: torch.device):
        self.compute, self.device = compute, device
        self._seen: set[Widths] = set()
        self._captured: dict[Widths, _Captured] = {}
        self._pool: Any = None

    def step(self, inputs: Sequence[Batches], widths: Widths) -> Tensor:
        """Losses [lanes] of one step, which is taken."""
        if self.device.type != "cuda" or widths not in self._seen:
            self._seen.add(widths)
            return self.compute(inputs, widths)
        if widths not in self._captured:
            self._captured[widths] = self._capture(inputs, widths)
        captured = self._captured[widths]
        for static, new in zip(captured.inputs, inputs, strict=True):
            for field in fields(Batches):
                getattr(static, field.name).copy_(getattr(new, field.name))
        captured.graph.replay()
        return captured.losses.clone()

    def forget(self) -> None:
        """Begin anew, because the layers have changed."""
        self._seen.clear()
        self._captured.clear()
        self._pool = None  # a pool whose graphs are gone cannot be captured into again

    def _capture(self, inputs: Sequence[Batches], widths: Widths) -> _Captured:
        """Record a step; nothing is computed yet."""
        static = [
            Batches(*(getattr(batch, field.name).clone() for field in fields(Batches)))
            for batch in inputs
        ]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, pool=self._pool):
            losses = self.compute(static, widths)
        return _Captured(graph, static, losses)
