from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from qtuning.methods.probing import fit_logistic, read_features
from tests.conftest import make_backbone


@pytest.mark.parametrize("penalty", [10.0, 1.0, 0.1])
def test_logistic_regression_equals_scikit_learn(penalty: float) -> None:
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(60, 8)), rng.integers(0, 3, 60)
    reference = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=5000).fit(features, labels)
    head = fit_logistic(torch.tensor(features), torch.tensor(labels), 3, penalty)
    ours = torch.softmax(torch.tensor(features) @ head.weight.T + head.bias, -1).numpy()
    np.testing.assert_allclose(ours, reference.predict_proba(features), atol=1e-5)


def test_features_are_the_models_own_without_a_prompt() -> None:
    backbone = make_backbone("bert", dtype=torch.float64)
    ids = backbone.tokenizer(["good soup", "bad river stone"])["input_ids"]
    found = read_features(backbone, ["good soup", "bad river stone"])
    for row, each in zip(found, ids, strict=True):
        states = backbone.model(input_ids=torch.tensor([each])).last_hidden_state[0]
        torch.testing.assert_close(row, states.mean(0), rtol=0, atol=1e-10)
