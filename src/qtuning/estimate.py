"""Time and memory of a run before it is run: a few real steps, counted up."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qtuning.config import TrainSettings
from qtuning.fit import Fit
from qtuning.pack import Pack
from qtuning.protocols import make_split
from qtuning.records import memory
from qtuning.runs import prepare

EVALUATION_SHARE = 0.35
"""A forward pass without gradient costs about a third of a training step of the same rows."""


def estimate(
    config: Any, seeds: Sequence[int], data: str | None, how: Mapping[str, Any]
) -> dict[str, Any]:
    """Rows and steps of every task; seconds and memory from a few steps of each, with an empty queue."""
    tasks, backbone, method, (_, train) = prepare(config, data, how, {})
    rows, seconds, step_seconds = [], 0.0, 0.0
    for task in tasks:
        split = make_split(
            config.protocol, task, train.shots, seeds[0], train.validation_limit, config.test_limit
        )
        epochs = train.epochs_of(len(split.train))
        steps = math.ceil(len(split.train) / train.batch_size) * epochs
        rows.append(
            {"name": task.name, "classes": len(task.label_names), **split.sizes, "steps": steps}
        )
        if hasattr(method, "lane"):
            lanes = [method.lane(method.start(seed), task, split) for seed in seeds]
            step_seconds = _time_step(Pack(backbone, lanes, train), train)
            per_row = step_seconds / (train.batch_size * len(seeds))
            validations = len(split.validation) * math.ceil(epochs / train.validate_every)
            tested = 2 * len(split.test) + config.inner_rows * len(tasks) / 2
            seconds += steps * step_seconds + EVALUATION_SHARE * per_row * len(seeds) * (
                validations + tested
            )
    if torch.cuda.is_available():
        used = torch.cuda.max_memory_allocated() / 2**20
    else:
        used = memory()["resident_bytes"] / 2**20
    return {"tasks": rows, "step_seconds": step_seconds, "seconds": seconds, "memory_mib": used}


def _time_step(pack: Pack, train: TrainSettings) -> float:
    fits = [Fit(lane, train) for lane in pack.lanes]
    times = []
    for _ in range(2):  # the first warms up
        began = time.perf_counter()
        pack.step([fit.next_batch() for fit in fits], [fit.step for fit in fits])
        pack.take_losses()  # waits for the device
        times.append(time.perf_counter() - began)
    return times[-1]
