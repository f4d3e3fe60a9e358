"""Steps as CUDA graphs: the whole step, optimiser included, is launched at once.

A step of one lane is hundreds of small kernels, and launching them one by one costs more than running
them. The first step of a shape runs as it is, which compiles and warms up what it needs; the second is
captured while it is recorded, and every later one is a replay on new inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qtuning.errors import in_a_line
from qtuning.passes import Passes
from qtuning.stack import Step

Compute = Callable[[Step, Passes], Tensor]
_failed: list[str] = []
"""Why a recording failed, in this process."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    step: Step
    losses: Tensor


def repeat(step: Callable[[], None], times: int, device: torch.device) -> None:
    """Take the same step so often, on tensors that it changes in place; on a card all but the first are replays."""
    if device.type != "cuda" or times < 4:
        for _ in range(times):
            step()
        return
    step()
    replay: Callable[[], None] = step
    # not every model can be captured
    with contextlib.suppress(RuntimeError):
        replay = record(step, device)
    for _ in range(times - 1):
        replay()
    torch.cuda.synchronize(device)  # before the graph and its memory go


def record(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What takes the same step again, on a card all of it at one launch; recording it there computes nothing.

    `torch.cuda.graph` would give all cached memory back first, and every recording would take it again: that costs
    more than the replays. Here all recordings share one pool, which lives on.
    """
    if device.type != "cuda":
        step()
        return step
    if _failed:
        raise RuntimeError(
            f"an earlier recording failed: {_failed[0]}"
        )  # and left its memory unusable
    try:
        with recording_stream(device):
            return _recorded(step, _room_for_repeats(device)[0]).replay
    except Exception as error:
        _failed.append(in_a_line(error))
        raise


def can_record(device: torch.device) -> bool:
    """Whether steps can be recorded there: on a card, if its driver lets us."""
    if device.type != "cuda" or _failed:
        return False
    try:
        _room_for_repeats(device)
    except RuntimeError as error:
        _failed.append(in_a_line(error))
    return not _failed


def _recorded(step: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """A step as a graph, in that memory and on the stream that is current."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool.id)
    try:
        step()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # which would hide what happened
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


@contextlib.contextmanager
def recording_stream(device: torch.device) -> Iterator[None]:
    """Inside, work goes to the stream of recordings, before and after which all other work waits.

    What a recording meets must have been made there: waiting for another stream would end it.
    """
    if device.type != "cuda":
        yield
        return
    stream, outside = _room_for_repeats(device)[1], torch.cuda.current_stream(device)
    stream.wait_stream(outside)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outside.wait_stream(stream)


@lru_cache
def _room_for_repeats(device: torch.device) -> tuple[Any, torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """Memory for recordings, the stream it belongs to, and a recording of nothing; they live as long as the process.

    The recording keeps the memory open: once all recordings in it are gone, torch lets no other one in.
    """
    with torch.cuda.device(device):
        pool, stream = torch.cuda.MemPool(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            nothing = torch.zeros(1, device=device)
            stream.synchronize()
            return pool, stream, _recorded(nothing.zero_, pool)


class StepGraphs:
    """The captured steps of one pack, by their passes; plain steps where nothing is captured.

    What computes a step is given with every call and not kept: a pack and its graphs that knew each other would wait
    for the garbage collector, and hold their memory on the card meanwhile.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._seen: set[Passes] = set()
        self._captured: dict[Passes, _Captured] = {}
        self._pool: Any = None

    def step(self, compute: Compute, step: Step, passes: Passes) -> Tensor:
        """Losses [lanes] of one step, which is taken."""
        if self.device.type != "cuda" or passes not in self._seen:
            self._seen.add(passes)
            return compute(step, passes)
        if passes not in self._captured:
            self._captured[passes] = self._capture(compute, step, passes)
        captured = self._captured[passes]
        for static, new in zip(captured.step.tensors(), step.tensors(), strict=True):
            static.copy_(new)
        captured.graph.replay()
        return captured.losses.clone()

    def forget(self) -> None:
        """Begin anew, because the layers have changed."""
        self._seen.clear()
        self._captured.clear()
        self._pool = None  # a pool whose graphs are gone cannot be captured into again

    def _capture(self, compute: Compute, step: Step, passes: Passes) -> _Captured:
        """Record a step; nothing is computed yet."""
        static = step.clone()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, pool=self._pool):
            losses = compute(static, passes)
        return _Captured(graph, static, losses)
