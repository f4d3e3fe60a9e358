"""Rules that make room in a full queue: pure functions on a matrix of rows.

Each takes the rows [n, d] of a full queue and returns [n - prompt_length, d].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qtuning.errors import ConfigError, unknown

EvictionRule = Callable[..., Tensor]


def check_components(count: int, prompt_length: int, dim: int) -> None:
    """Refuse a queue of `count` rows of width `dim` that PCA could not trim by one prompt."""
    keep, most = count - prompt_length, min(count - 1, dim)
    if keep > most:
        raise ConfigError(
            f"eviction 'pca' must keep {keep} components of a queue of {count} rows, but rows of width {dim} "
            f"have at most {most}. Lower queue_size or prompt_length, or choose eviction 'fifo'."
        )


def pca(
    rows: Tensor, prompt_length: int, generator: torch.Generator, keep_mean: bool = False
) -> Tensor:
    """Keep the first principal directions, scaled by their singular values (DQ-PCA).

    Paper: Eq. 4, U S V^T = SVD(Q - mean(Q)), and the trimmed queue is S_{C-l} V_{C-l}^T. A singular vector
    and its negative are equally good, but as prompts they differ: we make the largest entry of
    each left vector positive. Computed in float64 on the CPU, so that it does not depend on the
    device.
    """
    count, dim = rows.shape
    check_components(count, prompt_length, dim)
    keep = count - prompt_length
    exact = rows.detach().to("cpu", torch.float64)
    mean = exact.mean(dim=0, keepdim=True)
    left, singular, right = torch.linalg.svd(exact - mean, full_matrices=False)
    sizes = left.abs()  # of entries equally large up to rounding, the first decides
    largest = (sizes >= sizes.amax(dim=0) * (1 - 1e-9)).to(torch.uint8).argmax(dim=0)
    signs = torch.sign(left[largest, torch.arange(left.shape[1])])
    kept = singular[:keep, None] * (signs[:, None] * right)[:keep]
    trimmed: Tensor = kept + mean if keep_mean else kept
    return trimmed.to(rows.device, rows.dtype)


def fifo(
    rows: Tensor, prompt_length: int, generator: torch.Generator, keep_mean: bool = False
) -> Tensor:
    """Drop the oldest prompt."""
    return rows[prompt_length:].clone()


def random(
    rows: Tensor, prompt_length: int, generator: torch.Generator, keep_mean: bool = False
) -> Tensor:
    """Drop one prompt, drawn by the run's own generator."""
    prompts = rows.reshape(-1, prompt_length, rows.shape[1])
    dropped = int(torch.randint(len(prompts), (1,), generator=generator))
    return torch.cat([prompts[:dropped], prompts[dropped + 1 :]]).reshape(-1, rows.shape[1])


def none(
    rows: Tensor, prompt_length: int, generator: torch.Generator, keep_mean: bool = False
) -> Tensor:
    """Drop nothing: the queue grows with every task, as ProgPrompt's does."""
    return rows


EVICTIONS: dict[str, EvictionRule] = {"pca": pca, "fifo": fifo, "random": random, "none": none}


def get_eviction(name: str) -> EvictionRule:
    """The rule of that name."""
    if name not in EVICTIONS:
        raise ConfigError(unknown("eviction", name, EVICTIONS))
    return EVICTIONS[name]
