"""The queue of frozen prompts: a matrix of rows with a capacity. It knows nothing of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtuning.errors import ConfigError
from qtuning.eviction import check_components, get_eviction


@dataclass(frozen=True)
class PromptQueue:
    """Raw prompts of earlier tasks, oldest first. Every change returns a new queue.

    Paper: Q, with capacity C = l * Q_size (section 3.1). The scale is never folded in: the next
    task learns its own.
    """

    rows: Tensor
    """[n, d], n a multiple of `prompt_length`."""
    prompt_length: int
    queue_size: int
    eviction: str = "pca"
    keep_mean: bool = False
    newest_first: bool = False
    """Whether newer prompts stand before older ones in the sequence."""

    @classmethod
    def empty(
        cls,
        dim: int,
        prompt_length: int,
        queue_size: int,
        eviction: str = "pca",
        keep_mean: bool = False,
        newest_first: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> PromptQueue:
        """A queue with no prompt in it."""
        if eviction == "pca":  # now, not when the queue is full and half a stream is learnt
            check_components(prompt_length * queue_size, prompt_length, dim)
        rows = torch.zeros(0, dim, dtype=dtype)
        return cls(rows, prompt_length, queue_size, eviction, keep_mean, newest_first)

    @property
    def capacity(self) -> int:
        """Most rows it may hold, the current task's included."""
        return self.prompt_length * self.queue_size

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another prompt (never so with eviction 'none')."""
        return self.eviction != "none" and len(self.rows) >= self.capacity

    def with_room(self, generator: torch.Generator) -> PromptQueue:
        """The queue as a new task finds it: trimmed by one prompt if it was full (Eq. 4)."""
        if not self.is_full:
            return self
        rule = get_eviction(self.eviction)
        kept = rule(self.rows, self.prompt_length, generator, keep_mean=self.keep_mean)
        return replace(self, rows=kept)

    def append(self, prompt: Tensor) -> PromptQueue:
        """The queue with a finished prompt [l, d] at its end (Eq. 5)."""
        if self.is_full:
            raise ConfigError(
                f"the queue already holds {len(self.rows)} of {self.capacity} rows; call with_room first."
            )
        if prompt.shape != (self.prompt_length, self.rows.shape[1]):
            expected = (self.prompt_length, self.rows.shape[1])
            raise ConfigError(f"a prompt must have shape {expected}, got {tuple(prompt.shape)}.")
        return replace(self, rows=torch.cat([self.rows, prompt.detach().to(self.rows)]))

    def in_order(self) -> Tensor:
        """Rows in the order in which they stand in the sequence: whole prompts, oldest or newest first."""
        if not self.newest_first:
            return self.rows
        prompts = self.rows.reshape(-1, self.prompt_length, self.rows.shape[1])
        return prompts.flip(0).reshape(self.rows.shape)


def shares_kept(prompts: Sequence[Tensor], queue: Tensor) -> list[float]:
    """Of each prompt [l, d], the share (of squared length) that lies in the span of the queue [n, d].

    1 while a prompt is in the queue whole, less after each trim.
    """
    basis = torch.linalg.svd(queue.double(), full_matrices=False)
    kept = basis.Vh[1e-9 * basis.S.max() < basis.S]
    shares = []
    for prompt in prompts:
        rows = prompt.double()
        inside = float((rows @ kept.T).square().sum() / rows.square().sum())
        shares.append(round(min(max(inside, 0.0), 1.0), 4))
    return shares
