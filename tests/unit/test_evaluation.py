from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from qtuning.evaluation import (
    average_score,
    backward_transfer,
    forgetting,
    forward_transfer,
    majority_share,
    score_predictions,
)

MATRIX = np.array(
    [
        [0.5, 0.4, 0.3],
        [0.9, 0.6, 0.2],
        [0.7, 0.8, 0.5],
        [0.6, 0.9, 1.0],
    ]
)


def test_transfer_by_hand() -> None:
    assert average_score(MATRIX) == pytest.approx(2.5 / 3)
    assert backward_transfer(MATRIX) == pytest.approx(((0.6 - 0.9) + (0.9 - 0.8)) / 2)
    assert forward_transfer(MATRIX) == pytest.approx(((0.6 - 0.4) + (0.5 - 0.3)) / 2)
    assert forgetting(MATRIX) == pytest.approx(((0.9 - 0.6) + (0.8 - 0.9)) / 2)


def test_one_task_has_nothing_to_transfer() -> None:
    one = np.array([[0.5], [0.9]])
    assert forgetting(one) == backward_transfer(one) == forward_transfer(one) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gold, found = rng.integers(0, 4, 50), rng.integers(0, 5, 50)
    assert score_predictions("accuracy", gold, found) == pytest.approx(accuracy_score(gold, found))
    assert score_predictions("macro-f1", gold, found) == pytest.approx(
        f1_score(gold, found, average="macro", zero_division=0)
    )


def test_majority_share() -> None:
    assert majority_share([0, 0, 1, 2]) == 0.5
