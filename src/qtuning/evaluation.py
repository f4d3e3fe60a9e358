"""Scores of predictions, and what a score matrix says of a stream: pure functions on arrays.

`R[i, j]` is the score on task j (0-based) after learning i tasks; row 0 stands before any task.
Cells that were not measured are nan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def score_predictions(metric: str, gold: Sequence[int], predicted: Sequence[int]) -> float:
    """A score between 0 and 1: `accuracy`, or `macro-f1` over the classes that occur."""
    truth, guess = np.asarray(gold), np.asarray(predicted)
    if not len(truth):
        return float("nan")
    if metric == "accuracy":
        return float((truth == guess).mean())
    if metric == "macro-f1":
        scores = []
        for label in np.union1d(truth, guess):
            hits = float(((truth == label) & (guess == label)).sum())
            scores.append(2 * hits / float((truth == label).sum() + (guess == label).sum()))
        return float(np.mean(scores))
    raise ValueError(f"unknown metric {metric!r}")


def average_score(matrix: Matrix) -> float:
    """Mean over all tasks after the last one was learnt."""
    return float(np.mean(matrix[-1]))


def forgetting(matrix: Matrix) -> float:
    """Mean over all but the last task of (best score so far - final score), 0 if nothing was lost.

    Means something only where all cells of a column were measured on the same rows (`inner_rows=None`).
    """
    tasks = matrix.shape[1]
    if tasks < 2:
        return 0.0
    drops = [np.nanmax(matrix[j + 1 : -1, j]) - matrix[-1, j] for j in range(tasks - 1)]
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
