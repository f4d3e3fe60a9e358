"""Continual few-shot learning on one frozen language model: Q-tuning and its rivals.

    from qtuning import QTuner, Task

Names are imported when they are first used, so that `import qtuning` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "QTuner": "tuner",
    "Task": "tasks",
    "Split": "tasks",
    "PromptQueue": "queue",
    "MethodSettings": "config",
    "TrainSettings": "config",
    "load_backbone": "backbones",
    "wrap_model": "backbones",
    "load_task": "data",
    "get_stream": "streams",
    "run_stream": "stream_loop",
    "make_method": "methods",
    "export_peft": "export",
    "export_embeddings": "export",
    "import_peft": "peft_import",
    "QTuningError": "errors",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from qtuning.backbones import load_backbone as load_backbone
    from qtuning.backbones import wrap_model as wrap_model
    from qtuning.config import MethodSettings as MethodSettings
    from qtuning.config import TrainSettings as TrainSettings
    from qtuning.data import load_task as load_task
    from qtuning.errors import QTuningError as QTuningError
    from qtuning.export import export_embeddings as export_embeddings
    from qtuning.export import export_peft as export_peft
    from qtuning.methods import make_method as make_method
    from qtuning.peft_import import import_peft as import_peft
    from qtuning.queue import PromptQueue as PromptQueue
    from qtuning.stream_loop import run_stream as run_stream
    from qtuning.streams import get_stream as get_stream
    from qtuning.tasks import Split as Split
    from qtuning.tasks import Task as Task
    from qtuning.tuner import QTuner as QTuner


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qtuning' has no attribute {name!r}")
    return getattr(importlib.import_module(f"qtuning.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
