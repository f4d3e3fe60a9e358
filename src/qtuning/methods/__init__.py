"""Methods by name. A method is one file and one line of registration at its foot.

The contract: `start(seed) -> state`, `learn(state, task, split) -> state`, and states that hold a
snapshot for every task they can answer. States are values: `learn` returns a new one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from qtuning.backbones import Backbone
from qtuning.config import MethodSettings, TrainSettings
from qtuning.errors import ConfigError, unknown
from qtuning.lanes import Report
from qtuning.snapshots import Snapshot
from qtuning.tasks import Split, Task


class State(Protocol):
    """What a run knows after some tasks."""

    @property
    def snapshots(self) -> dict[str, Snapshot]:
        """The finished tasks, by name."""
        ...


class Method(Protocol):
    """One way to learn a stream of tasks."""

    def start(self, seed: int) -> Any:
        """The state before any task."""
        ...

    def learn(self, state: Any, task: Task, split: Split, report: Report | None = None) -> Any:
        """The state after one more task."""
        ...

    def pack(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a later task needs, as tensors and JSON, for a collection on disk."""
        ...

    def unpack(
        self, tensors: dict[str, Tensor], facts: dict[str, Any], snapshots: dict[str, Snapshot]
    ) -> Any:
        """The state that `pack` described."""
        ...


@dataclass(frozen=True)
class MethodInfo:
    """A registered method: what a table or a person needs to know to choose it."""

    name: str
    description: str
    paper: str
    make: Callable[[Backbone, MethodSettings, TrainSettings], Method]
    families: tuple[str, ...] = ("encoder", "causal", "seq2seq")
    forgets: bool = False
    stores_data: bool = False
    packable: bool = True
    grid: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """What `qtuning tune` tries: factors on default settings; names joined by + move together."""


PROMPT_GRID = {"prompt_lr+shared_lr": (0.3, 1.0, 3.0), "epochs": (1.0, 2.0)}
WEIGHTS_GRID = {"weights_lr": (0.3, 1.0, 3.0), "epochs": (0.5, 1.0)}
REPLAY_GRID = {"weights_lr": (0.3, 1.0, 3.0), "replay_share": (1.0, 25.0)}


_REGISTRY: dict[str, MethodInfo] = {}
_FILES = (
    "qtuning",
    "plus",
    "prompting",
    "carrying",
    "probing",
    "asking",
    "finetuning",
    "replaying",
    "ewc",
    "multitask",
    "mbpa",
    "idbr",
    "lfpt5",
)


def register(info: MethodInfo) -> None:
    """Make a method known by its name."""
    if info.name in _REGISTRY:
        raise ConfigError(
            f"a method named {info.name!r} is registered already; choose another name."
        )
    _REGISTRY[info.name] = info


def list_methods() -> dict[str, MethodInfo]:
    """All registered methods, by name."""
    for file in _FILES:
        importlib.import_module(f"qtuning.methods.{file}")
    return dict(_REGISTRY)


def get_method(name: str) -> MethodInfo:
    """What is known of a registered method."""
    known = list_methods()
    if name not in known:
        raise ConfigError(unknown("method", name, known))
    return known[name]


def make_method(
    name: str, backbone: Backbone, method: MethodSettings, train: TrainSettings
) -> Method:
    """A registered method, bound to a backbone and settings."""
    info = get_method(name)
    if backbone.family not in info.families:
        raise ConfigError(
            f"method {name!r} serves {', '.join(info.families)} models, and {backbone.name!r} is of the "
            f"{backbone.family} family. Choose another model or method."
        )
    return info.make(backbone, method, train)
