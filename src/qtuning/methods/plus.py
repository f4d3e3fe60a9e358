"""Q-tuning-plus: a prompt as long as the whole Q-prompt, which starts from the earlier task that helps, if one does.

What came out best of the departures from the paper that were tried (docs/findings.md): finished prompts are worth more
as a place to start from than as frozen rows before the new one. So there is no queue here; the latest tasks are asked
which of them, as it stands, answers the new task's training examples best, and that prompt is taken if it beats
guessing (`warm_start: answers`). For few steps a task the best candidate took the one with the lowest loss, without a
bar (`warm_start: loss`, the preset `smollm2-quick`).

Relations: `per-task-prompt-long` is the same without the start, and learns exactly what this learns where no earlier
task beats guessing.
"""

from __future__ import annotations

from dataclasses import replace

from qtuning.backbones import Backbone
from qtuning.config import MethodSettings, TrainSettings
from qtuning.methods import PROMPT_GRID, MethodInfo, register
from qtuning.methods.prompting import per_task_prompt_long
from qtuning.methods.qtuning import QTuning


def q_tuning_plus(backbone: Backbone, settings: MethodSettings, train: TrainSettings) -> QTuning:
    """Without a start of its own choosing it would be the control, so `none` stands for the usual one.

    An encoder has no head to answer a new task with: there the nearest texts decide, and every task but the first has
    a start.
    """
    usual = "key" if backbone.needs_head else "answers"
    start = usual if settings.warm_start == "none" else settings.warm_start
    return per_task_prompt_long(backbone, replace(settings, warm_start=start), train)


register(
    MethodInfo(
        name="q-tuning-plus",
        description="a long prompt for every task, which starts from the earlier task that helps most",
        paper="Guo et al., 2024, arXiv 2404.14607",
        make=q_tuning_plus,
        grid=PROMPT_GRID,
    )
)
