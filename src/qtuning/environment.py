"""Facts about this installation, for bug reports."""

from __future__ import annotations

import importlib
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from qtuning import __version__
from qtuning.backbones.sources import SOURCES, cache_folder, packaged_file

PACKAGES = ("transformers", "safetensors", "huggingface-hub", "numpy", "peft", "datasets", "ray")


def describe() -> dict[str, Any]:
    """Versions, device, threads, and which backbones are at hand without a hub."""
    facts: dict[str, Any] = {
        "qtuning": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "cache": str(cache_folder()),
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    for name, source in SOURCES.items():
        here = packaged_file(source) is not None
        facts[f"model {name}"] = "at hand" if here else f"not at hand ({source.install})"
    facts["torchvision"] = _torchvision()
    return facts


def _torchvision() -> str:
    """A torchvision built for another torch breaks imports of transformers with a misleading message."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return "not installed (not needed)"
    except Exception as error:  # whatever it raises is the finding
        return f"BROKEN, uninstall it or match it to torch: {error}"
    return "works"
