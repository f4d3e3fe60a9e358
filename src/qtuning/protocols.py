"""Which rows train, validate and test: four protocols under one signature.

`given` is `Task.split`: the marks of the rows, or what is left over. `progprompt` does what the code of
ProgressivePrompts does (its evaluation rows are halved into validation and test); `paper` does what the Q-tuning
paper writes (validation held out from train, the official evaluation split as test). `tuning` takes all three parts
from the training rows, so that settings can be chosen on a data set whose test rows are reported elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from qtuning.errors import ConfigError, unknown
from qtuning.seeding import numpy_generator
from qtuning.tasks import Split, Task

ALL_TRAINING_ROWS = ("cb", "copa", "wsc")
"""Sets that ProgressivePrompts always trains on in full, whatever the shots (protocol A22)."""
ALL_EVALUATION_ROWS = ("cola", "copa", "rte", "cb", "wsc", "wnli")
"""Small sets whose whole evaluation split is halved."""
PAPER_VALIDATION = 500
"""Validation rows per class that the paper holds out, where there are so many."""


def make_split(
    protocol: str,
    task: Task,
    shots: int,
    seed: int,
    validation_limit: int = 500,
    test_limit: int = 0,
) -> Split:
    """The rows of a run.

    Args:
        protocol: `given`, `progprompt`, `paper` or `tuning`.
        task: With its rows marked train and test.
        shots: Training rows per class; 0 takes all.
        seed: Of the run.
        validation_limit: Validation rows per class at most.
        test_limit: Test rows per class at most; 0 takes all. The same rows for every seed and method.
    """
    if protocol not in PROTOCOLS:
        raise ConfigError(unknown("protocol", protocol, PROTOCOLS))
    split = PROTOCOLS[protocol](task, shots, seed, validation_limit)
    if not test_limit:
        return split
    kept = _per_class(
        task, list(range(len(split.test))), split.test.labels, test_limit, "test-limit"
    )
    return Split(split.train, split.validation, split.test.at(kept), split.notes)


def _given(task: Task, shots: int, seed: int, validation_limit: int) -> Split:
    """The parts the rows are marked for, or what is left over after training."""
    return task.split(shots, seed, validation_limit)


def _progprompt(task: Task, shots: int, seed: int, validation_limit: int) -> Split:
    """K per class from train; max(500, 0.2 k) per class of the evaluation rows, half to each part."""
    train, evaluation = _pools(task)
    notes = []
    if task.name in ALL_TRAINING_ROWS:
        notes.append(f"trains on all {len(train)} rows, as ProgressivePrompts does")
    else:
        train = _per_class(task, train, task.label_ids, shots, f"train-{seed}") if shots else train
    if task.name not in ALL_EVALUATION_ROWS:
        size = 400 if task.name == "sst2" else max(500, shots // 5)
        evaluation = _per_class(task, evaluation, task.label_ids, size, "evaluation")
    order = numpy_generator("halves", task.name).permutation(len(evaluation))
    half = len(evaluation) // 2
    validation = [evaluation[i] for i in order[:half]]
    test = [evaluation[i] for i in order[half:]]
    validation = _per_class(
        task, validation, task.label_ids, validation_limit, f"validation-{seed}"
    )
    return Split(task.pick(train), task.pick(validation), task.pick(test), tuple(notes))


def _paper(task: Task, shots: int, seed: int, validation_limit: int) -> Split:
    """K per class to train; min(500, half of what remains) per class to validate; test as published."""
    pool, test = _pools(task)
    train = _per_class(task, pool, task.label_ids, shots, f"train-{seed}") if shots else pool
    taken = set(train)
    validation: list[int] = []
    for label in range(len(task.label_names)):
        rest = [i for i in pool if i not in taken and task.label_ids[i] == label]
        size = min(PAPER_VALIDATION, validation_limit, len(rest) // 2)
        validation += _per_class(task, rest, task.label_ids, size, f"validation-{seed}")
    return Split(task.pick(train), task.pick(validation), task.pick(test), ())


def _tuning(task: Task, shots: int, seed: int, validation_limit: int) -> Split:
    """Training rows alone: of each class a half, 500 at most, is held out for every seed alike, to be halved again."""
    pool, _ = _pools(task)
    held: list[int] = []
    for label in range(len(task.label_names)):
        own = [i for i in pool if task.label_ids[i] == label]
        held += _per_class(
            task, own, task.label_ids, min(PAPER_VALIDATION, len(own) // 2), "tuning"
        )
    taken = set(held)
    train = [i for i in pool if i not in taken]
    train = _per_class(task, train, task.label_ids, shots, f"train-{seed}") if shots else train
    order = numpy_generator("tuning-halves", task.name).permutation(len(held))
    validation, test = ([held[i] for i in order[k::2]] for k in (0, 1))
    validation = _per_class(
        task, validation, task.label_ids, validation_limit, f"validation-{seed}"
    )
    return Split(task.pick(train), task.pick(validation), task.pick(test), ())


def _pools(task: Task) -> tuple[list[int], list[int]]:
    marks = task.splits or ()
    train = [i for i, mark in enumerate(marks) if mark == "train"]
    evaluation = [i for i, mark in enumerate(marks) if mark == "test"]
    if not train or not evaluation:
        raise ConfigError(
            f"task {task.name!r} has no rows marked train and test; use protocol 'given' for it."
        )
    return train, evaluation


def _per_class(
    task: Task, pool: list[int], labels: tuple[int, ...], size: int, purpose: str
) -> list[int]:
    """At most `size` of the pool's rows from each class, drawn for that purpose, in the pool's order."""
    kept: list[int] = []
    for label in range(len(task.label_names)):
        own = [i for i in pool if labels[i] == label]
        order = numpy_generator("protocol", purpose, task.name, label).permutation(len(own))
        kept += [own[j] for j in order[:size]]
    return sorted(kept)


PROTOCOLS: dict[str, Callable[[Task, int, int, int], Split]] = {
    "given": _given,
    "progprompt": _progprompt,
    "paper": _paper,
    "tuning": _tuning,
}
