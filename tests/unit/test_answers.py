from __future__ import annotations

from qtuning.backbones.answers import AnswerSet
from qtuning.scoring import _label_table


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


def test_every_label_is_read_on_one_path() -> None:
    table = _label_table(AnswerSet.build([(1, 2), (3, 4), (5,)]))
    assert table[:, :, 0].tolist() == [[1, 2], [-1, -1]]
    assert table[:, :, 1].tolist() == [[-1, -1], [3, 4]]
    assert table[:, :, 2].tolist() == [[5, -1], [-1, -1]]
