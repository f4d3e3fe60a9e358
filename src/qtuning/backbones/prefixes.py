"""What a causal model remembers of a prompt: keys and values of every layer, computed once per task.

A prompt stands before every text of its task, so a causal model reads it the same way each time: once is enough, and
texts go on from there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

MOST_BYTES = 2**31
"""Of all that is remembered; what was asked for longest ago goes first."""


class PromptMemory:
    """Prompts that a causal model has read. Any number of threads may ask."""

    def __init__(self, read: Callable[[Tensor], Tensor], most_bytes: int = MOST_BYTES):
        """`read` is the backbone's `read_prompt`."""
        self._read, self.most_bytes = read, most_bytes
        self._kept: OrderedDict[Tensor, Tensor] = (
            OrderedDict()
        )  # by the tensor itself, not its numbers
        self._bytes = 0
        self._lock = Lock()

    def recall(self, layout: Tensor) -> Tensor:
        """[layers, 2, heads, rows, head width] of a prompt [rows, d]: keys and values."""
        with self._lock:
            if layout in self._kept:
                self._kept.move_to_end(layout)
                return self._kept[layout]
        found = self._read(layout)
        with self._lock:
            if layout not in self._kept:
                self._kept[layout] = found
                self._bytes += found.nbytes
            while self._bytes > self.most_bytes and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found


class Prefixes:
    """The prompts of some tasks, as caches for rows of those tasks."""

    def __init__(self, memory: PromptMemory, layouts: Sequence[Tensor]):
        self.memory, self.layouts = memory, layouts

    def of(self, tasks: Tensor) -> tuple[Any, Tensor]:
        """A cache for rows of these tasks [n], padded on the right, and how much of it is filled [n]."""
        numbers = tasks.tolist()
        distinct = {number: i for i, number in enumerate(dict.fromkeys(numbers))}
        parts = [self.memory.recall(self.layouts[number]) for number in distinct]
        sizes = [part.shape[-2] for part in parts]
        together = torch.stack(
            [
                F.pad(part, (0, 0, 0, max(sizes) - size))
                for part, size in zip(parts, sizes, strict=True)
            ]
        )
        rows = torch.tensor([distinct[number] for number in numbers], device=tasks.device)
        cache = DynamicCache()
        for layer in range(together.shape[1]):
            cache.update(together[:, layer, 0][rows], together[:, layer, 1][rows], layer)
        return cache, torch.tensor(sizes, device=tasks.device)[rows]
