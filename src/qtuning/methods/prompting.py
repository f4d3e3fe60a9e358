"""Prompt methods that are Q-tuning with parts switched off: per-task and shared prompts, ProgPrompt.

Relations: `per-task-prompt` learns each task alone, so nothing helps and nothing is lost.
`per-task-prompt-long` has as many rows as the whole Q-prompt: the control that tells transfer from
length. `shared-prompt` has a shared prompt under retention where the queue was. `prog-prompt` keeps every
prompt for ever, so its cost grows with each task.
"""

from __future__ import annotations

from dataclasses import replace

from qtuning.backbones import Backbone
from qtuning.config import MethodSettings, TrainSettings
from qtuning.methods import PROMPT_GRID, MethodInfo, register
from qtuning.methods.qtuning import QTuning

LESTER = "Lester et al., 2021, arXiv 2104.08691"


def per_task_prompt(backbone: Backbone, settings: MethodSettings, train: TrainSettings) -> QTuning:
    """A queue of one: it is emptied before every task."""
    alone = replace(settings, queue_size=1, eviction="fifo", shared_length=0, scale=False)
    return QTuning(backbone, alone, train)


def per_task_prompt_long(
    backbone: Backbone, settings: MethodSettings, train: TrainSettings
) -> QTuning:
    """The same with the rows of shared prefix and full queue together."""
    rows = settings.shared_length + settings.prompt_length * settings.queue_size
    return per_task_prompt(backbone, replace(settings, prompt_length=rows), train)


def shared_prompt(backbone: Backbone, settings: MethodSettings, train: TrainSettings) -> QTuning:
    """A shared prompt as long as the queue and a prompt per task; retention from the second task on."""
    length = settings.prompt_length * settings.queue_size
    alone = replace(settings, queue_size=1, eviction="fifo", shared_length=length, scale=False)
    return QTuning(backbone, alone, train)


def prog_prompt(backbone: Backbone, settings: MethodSettings, train: TrainSettings) -> QTuning:
    """Every prompt is kept, newest first as in the released code (protocol A17)."""
    growing = replace(settings, eviction="none", shared_length=0, scale=False, newest_first=True)
    return QTuning(backbone, growing, train)


register(
    MethodInfo(
        "per-task-prompt",
        "a fresh prompt for every task",
        LESTER,
        per_task_prompt,
        grid=PROMPT_GRID,
    )
)
register(
    MethodInfo(
        "per-task-prompt-long",
        "a fresh prompt for every task, as long as the whole Q-prompt (length control)",
        LESTER,
        per_task_prompt_long,
        grid=PROMPT_GRID,
    )
)
register(
    MethodInfo(
        "shared-prompt",
        "a long prompt shared by all tasks, kept by retention, and a short one per task; no queue",
        "Guo et al., 2024, arXiv 2404.14607, section 5",
        shared_prompt,
        grid=PROMPT_GRID,
    )
)
register(
    MethodInfo(
        "prog-prompt",
        "all earlier prompts stay before the new one; the sequence grows with every task",
        "Razdaibiedina et al., 2023, arXiv 2301.12314",
        prog_prompt,
        grid=PROMPT_GRID,
    )
)
