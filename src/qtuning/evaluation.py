"""Scores of predictions, and what a score matrix says of a stream: pure functions on arrays.

`R[i, j]` is the score on task j (0-based) after learning i tasks; row 0 stands before any task.
Cells that were not measured are nan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Labels = NDArray[np.int64]
Groups = Sequence[str] | None


def score_parts(
    metric: str,
    gold: Sequence[int],
    predicted: Sequence[int],
    groups: Sequence[str] | None = None,
) -> dict[str, float]:
    """Each part of a metric such as `accuracy+f1`, between 0 and 1 (Matthews: -1 and 1)."""
    truth, guess = np.asarray(gold), np.asarray(predicted)
    if not len(truth):
        return {name: float("nan") for name in metric.split("+")}
    return {name: METRICS[name](truth, guess, groups) for name in metric.split("+")}


def score_predictions(
    metric: str,
    gold: Sequence[int],
    predicted: Sequence[int],
    groups: Sequence[str] | None = None,
) -> float:
    """One number: the mean of the metric's parts, as the paper averages two metrics."""
    return float(np.mean(list(score_parts(metric, gold, predicted, groups).values())))


def _accuracy(gold: Labels, guess: Labels, groups: Groups) -> float:
    return float((gold == guess).mean())


def _f1_of(label: int, gold: Labels, guess: Labels) -> float:
    hits = float(((gold == label) & (guess == label)).sum())
    total = float((gold == label).sum() + (guess == label).sum())
    return 2 * hits / total if total else 0.0


def _f1(gold: Labels, guess: Labels, groups: Groups) -> float:
    """F1 of class 1, the positive one of two."""
    return _f1_of(1, gold, guess)


def _macro_f1(gold: Labels, guess: Labels, groups: Groups) -> float:
    """Mean F1 over the classes that occur."""
    return float(np.mean([_f1_of(label, gold, guess) for label in np.union1d(gold, guess)]))


def _matthews(gold: Labels, guess: Labels, groups: Groups) -> float:
    """Matthews correlation of two classes; 0 where it is not defined."""
    a, b = gold == 1, guess == 1
    tp, tn = float((a & b).sum()), float((~a & ~b).sum())
    fp, fn = float((~a & b).sum()), float((a & ~b).sum())
    norm = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    return (tp * tn - fp * fn) / norm if norm else 0.0


def _exact_match(gold: Labels, guess: Labels, groups: Groups) -> float:
    """Share of groups (the answers to one question of MultiRC) in which every row is right."""
    if groups is None:
        return _accuracy(gold, guess, None)
    wrong = {group for group, right in zip(groups, gold == guess, strict=True) if not right}
    return 1 - len(wrong) / len(set(groups))


METRICS: dict[str, Callable[[Labels, Labels, Groups], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro-f1": _macro_f1,
    "matthews": _matthews,
    "exact-match": _exact_match,
}


def average_score(matrix: Matrix) -> float:
    """Mean over all tasks after the last one was learnt."""
    return float(np.mean(matrix[-1]))


def forgetting(matrix: Matrix) -> float:
    """Mean over all but the last task of (best score so far - final score), 0 if nothing was lost.

    Means something only where all cells of a column were measured on the same rows.
    """
    tasks = matrix.shape[1]
    if tasks < 2:
        return 0.0
    drops = [np.fmax.reduce(matrix[j + 1 : -1, j]) - matrix[-1, j] for j in range(tasks - 1)]
    return float(np.mean(drops))


def backward_transfer(matrix: Matrix) -> float:
    """BWT: mean over j < T of R[T, j] - R[j, j] (Lopez-Paz and Ranzato, 2017)."""
    tasks = matrix.shape[1]
    if tasks < 2:
        return 0.0
    return float(np.mean([matrix[-1, j] - matrix[j + 1, j] for j in range(tasks - 1)]))


def forward_transfer(matrix: Matrix) -> float:
    """FWT: mean over j >= 2 of R[j - 1, j] - R[0, j], the next task before and after its elders."""
    tasks = matrix.shape[1]
    if tasks < 2:
        return 0.0
    return float(np.mean([matrix[j, j] - matrix[0, j] for j in range(1, tasks)]))


def majority_share(labels: Sequence[int]) -> float:
    """What always answering the most frequent class would score."""
    _, counts = np.unique(np.asarray(labels), return_counts=True)
    return float(counts.max() / counts.sum())


def learning_gain(matrix: Matrix, alone: Sequence[float]) -> float:
    """Mean over tasks of R[j, j] minus the score of learning task j alone: help from earlier tasks."""
    return float(np.mean([matrix[j + 1, j] - alone[j] for j in range(matrix.shape[1])]))


def average_so_far(matrix: Matrix) -> list[float]:
    """After each task, the mean over the tasks learnt until then."""
    return [float(np.mean(matrix[i, :i])) for i in range(1, matrix.shape[0])]


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided sign-flip test of paired differences: how often chance is as far from 0.

    All 2^n sign patterns are counted, so the smallest p with n pairs is 2 / 2^n.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not len(values) or len(values) > 20:
        return float("nan")
    patterns = (np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1
    sums = np.abs((2 * patterns - 1) @ values)
    return float((sums >= abs(values.sum()) - 1e-12).mean())
