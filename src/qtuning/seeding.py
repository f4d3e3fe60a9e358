"""Random numbers that belong to one run and one purpose, whatever else runs beside it."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed that depends on every part and on nothing else."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def torch_generator(*parts: str | int) -> torch.Generator:
    """A CPU generator for this run and purpose, e.g. `torch_generator(seed, task, "prompt")`."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def numpy_generator(*parts: str | int) -> np.random.Generator:
    """The same for numpy."""
    return np.random.default_rng(derive_seed(*parts))
