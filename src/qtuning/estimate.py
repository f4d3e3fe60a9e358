"""Time and memory of a run before it is run: a few real steps, counted up."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from qtuning.lanes import _begin, _step
from qtuning.protocols import make_split
from qtuning.records import memory
from qtuning.runs import prepare

EVALUATION_SHARE = 0.35
"""A forward pass without gradient costs about a third of a training step of the same rows."""


def estimate(
    config: Any, seeds: Sequence[int], data: str | None, device: str | None
) -> dict[str, Any]:
    """Rows and steps of every task; seconds and memory from timing the longest task's first steps."""
    tasks, backbone, method, (_, train) = prepare(config, data, device)
    rows, seconds, step_seconds = [], 0.0, 0.0
    for task in tasks:
        split = make_split(
            config.protocol, task, train.shots, seeds[0], train.validation_limit, config.test_limit
        )
        steps = math.ceil(len(split.train) / train.batch_size) * train.epochs
        rows.append(
            {"name": task.name, "classes": len(task.label_names), **split.sizes, "steps": steps}
        )
        if hasattr(method, "lane"):
            lanes = [_begin(method.lane(method.start(seed), task, split), train) for seed in seeds]
            step_seconds = _time_step(backbone, lanes)
            per_row = step_seconds / (train.batch_size * len(seeds))
            validations = len(split.validation) * math.ceil(train.epochs / train.validate_every)
            tested = 2 * len(split.test) + config.inner_rows * len(tasks) / 2
            seconds += steps * step_seconds + EVALUATION_SHARE * per_row * len(seeds) * (
                validations + tested
            )
    if torch.cuda.is_available():
        used = torch.cuda.max_memory_allocated() / 2**20
    else:
        used = memory()["resident_bytes"] / 2**20
    return {"tasks": rows, "step_seconds": step_seconds, "seconds": seconds, "memory_mib": used}


def _time_step(backbone: Any, fits: Sequence[Any]) -> float:
    times = []
    for _ in range(2):  # the first warms up
        began = time.perf_counter()
        _step(backbone, [(fit, fit.next_batch()) for fit in fits])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times[-1]
