from __future__ import annotations

import torch

from qtuning.backbones.answers import AnswerSet


def test_one_token_labels_need_a_single_empty_path() -> None:
    answers = AnswerSet.build([(3,), (5,), (7,)])
    assert answers.paths == ((),)
    assert answers.longest == 1


def test_shared_beginnings_are_read_once() -> None:
    answers = AnswerSet.build([(1, 2, 9), (1, 3), (4,), (1, 2, 8)])
    assert answers.paths == ((1, 2),)
    assert answers.path_of == (0, 0, 0, 0)
    branching = AnswerSet.build([(1, 2), (3, 4), (5,)])
    assert branching.paths == ((1,), (3,))
    assert branching.path_of == (0, 1, 0)


def test_log_probs_sum_along_each_sequence() -> None:
    answers = AnswerSet.build([(1, 2), (3, 4), (5,)])
    logs = torch.randn(6, 2, 2, 10)
    found = answers.log_probs(logs)
    for n in range(6):
        assert torch.isclose(found[n, 0], logs[n, 0, 0, 1] + logs[n, 0, 1, 2])
        assert torch.isclose(found[n, 1], logs[n, 1, 0, 3] + logs[n, 1, 1, 4])
        assert torch.isclose(found[n, 2], logs[n, 0, 0, 5])
