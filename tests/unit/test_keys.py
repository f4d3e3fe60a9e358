"""Finding the task of a text: keys, similarity, the unknown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qtuning import QTuner
from qtuning.config import make_settings
from qtuning.errors import TaskError
from qtuning.keys import Finder, directions, learn_key, learn_keys, read_features, reference
from qtuning.methods import make_method
from qtuning.predictor import UNKNOWN
from qtuning.snapshots import TaskKey
from qtuning.stream_loop import run_stream
from qtuning.tasks import Rows, Split
from tests.conftest import SMALL, THINGS, TOPICS, make_backbone, make_task

TEXTS = ["good soup", "bad cold bread and late soup", "slow"]


def test_features_do_not_depend_on_the_batch(exact_backbone) -> None:
    together = read_features(exact_backbone, TEXTS)
    alone = torch.cat([read_features(exact_backbone, [text]) for text in TEXTS])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_a_feature_is_the_mean_over_the_texts_tokens(bert) -> None:
    coded = bert.tokenizer("good cold soup", return_tensors="pt")
    with torch.no_grad():
        states = bert.model(**coded).last_hidden_state[0]
    torch.testing.assert_close(read_features(bert, ["good cold soup"])[0], states.mean(dim=0))


def test_a_key_is_the_direction_most_similar_to_the_training_texts(bert) -> None:
    split = make_task("task", rows=20).split(8)
    key = learn_key(bert, split)
    mean, spread = reference(bert)
    features = read_features(bert, split.train.texts).numpy()
    own = (features - mean.numpy()) / spread.numpy()
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    best = (own @ key.vector.numpy()).mean()
    expected = own.mean(axis=0) / np.linalg.norm(own.mean(axis=0))
    np.testing.assert_allclose(key.vector.numpy(), expected, atol=1e-5)
    random = np.random.default_rng(0)
    for _ in range(50):
        other = key.vector.numpy() + 0.1 * random.normal(size=len(expected))
        assert (own @ (other / np.linalg.norm(other))).mean() < best
    judged = read_features(bert, split.validation.texts).numpy()
    judged = (judged - mean.numpy()) / spread.numpy()
    judged /= np.linalg.norm(judged, axis=1, keepdims=True)
    assert key.threshold == pytest.approx(np.quantile(judged @ expected, 0.05), abs=1e-5)


def test_a_finder_compares_each_key_in_its_own_space() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    spaces = [(draw(6), draw(6).abs() + 0.1) for _ in range(2)]
    keys = {
        f"task{i}": TaskKey(torch.nn.functional.normalize(draw(6), dim=0), *spaces[i % 2], -1.0)
        for i in range(5)
    }
    features = draw(7, 6)
    found = Finder(keys).similarities(features)
    for i, key in enumerate(keys.values()):
        expected = directions(features, key.mean, key.spread) @ key.vector
        torch.testing.assert_close(found[:, i], expected)
    nearest = Finder(keys).find(features)
    assert [each.task for each in nearest] == [f"task{i}" for i in found.argmax(dim=1).tolist()]
    assert all(each.is_known for each in nearest)


def other_words(name: str, words: list[str], rows: int = 20):
    """A task whose texts have words that no other task's have."""
    from qtuning import Task

    drawn = np.random.default_rng(len(name))
    texts = [" ".join(drawn.choice(words, 6)) for _ in range(rows)]
    return Task(name, texts, [("yes", "no")[i % 2] for i in range(rows)])


def test_predict_without_a_task_finds_it(family_backbone, tmp_path: Path) -> None:
    tasks = [other_words("topics", TOPICS), other_words("things", THINGS)]
    tuner = QTuner(family_backbone, **SMALL)
    for task in tasks:
        tuner.learn(task, progress=False)
    first = tuner.state.snapshots["topics"].key
    texts = [text for task in tasks for text in task.texts[:6]]
    names = [task.name for task in tasks for _ in range(6)]
    found = tuner.find_tasks(texts)
    assert np.mean([f.task == name for f, name in zip(found, names, strict=True)]) > 0.7
    for text, answer, each in zip(texts, tuner.answer(texts), found, strict=True):
        assert answer.similarity == each.similarity
        if each.is_known:
            assert answer.task == each.task
            assert answer.label == tuner.predict(text, each.task) == tuner.predict(text)
            assert answer.probabilities == pytest.approx(tuner.predict_proba(text, each.task))
        else:
            assert (answer.task, answer.label) == (None, UNKNOWN)
    tuner.learn(make_task("third", rows=10), progress=False)
    assert tuner.state.snapshots["topics"].key is first  # old keys never change
    tuner.save_pretrained(tmp_path / "c")
    loaded = QTuner.from_pretrained(tmp_path / "c", model=family_backbone)
    assert loaded.answer(texts) == tuner.answer(texts)


def test_a_text_unlike_all_tasks_is_unknown(bert) -> None:
    tuner = QTuner(bert, **SMALL)
    for name, words in (("topics", TOPICS), ("things", THINGS)):
        tuner.learn(other_words(name, words), progress=False)
    for name, snapshot in tuner.state.snapshots.items():
        strict = TaskKey(*(getattr(snapshot.key, n) for n in ("vector", "mean", "spread")), 1.01)
        tuner.state.snapshots[name] = type(snapshot)(
            snapshot.card, snapshot.rows, snapshot.head, snapshot.facts, key=strict
        )
    tuner.adopt(tuner.state)
    answer = tuner.answer("good soup")
    assert (answer.task, answer.label, answer.probabilities) == (None, UNKNOWN, {})
    assert tuner.predict(["good soup"]) == [UNKNOWN]
    assert tuner.predict("good soup", "topics") in ("yes", "no")  # told the task, it answers


def test_what_cannot_be_found_is_said(bert) -> None:
    tuner = QTuner(bert, **SMALL)
    with pytest.raises(TaskError, match="no task was learnt yet"):
        tuner.predict("good")
    for i in range(2):
        tuner.learn(make_task(f"task{i}", rows=10, seed=i), progress=False)
    with pytest.raises(TaskError, match="no task takes pairs of texts"):
        tuner.predict(("good", "soup"))
    with pytest.raises(TaskError, match="must be a non-empty string"):
        tuner.predict([" "])
    snapshot = tuner.state.snapshots["task0"]
    tuner.state.snapshots["task0"] = type(snapshot)(snapshot.card, snapshot.rows, snapshot.head)
    tuner.adopt(tuner.state)
    with pytest.raises(TaskError, match="task0 has no key; learn it again"):
        tuner.predict("good")


def test_a_stream_says_how_often_the_task_is_found(bert) -> None:
    method, train = make_settings(**SMALL)
    tasks = [other_words("topics", TOPICS, 30), other_words("things", THINGS, 30)]
    result = run_stream(make_method("q-tuning", bert, method, train), bert, tasks, train)
    finder = Finder({n: s.key for n, s in result.state.snapshots.items()})
    for task in tasks:
        rows = result.splits[task.name].test
        found = finder.find(read_features(bert, rows.texts))
        share = np.mean([each.task == task.name for each in found])
        assert result.found[task.name]["found"] == pytest.approx(share)
        assert result.found[task.name]["task_free_accuracy"] <= share


def test_snapshots_on_disk_are_seen_when_one_goes_through_them(tmp_path: Path) -> None:
    """Methods and finders go through all tasks of a run, whose snapshots lie in its folder."""
    from qtuning.records import DiskSnapshots, write_tensors
    from qtuning.snapshots import Snapshot, TaskCard, added

    def snapshot(name: str) -> Snapshot:
        return Snapshot(TaskCard(name, ("a", "b"), {"a": "a", "b": "b"}), torch.zeros(2, 3))

    for name in ("first", "second"):
        facts = {"card": {"name": name, "label_names": ["a", "b"], "label_words": {}}, "facts": {}}
        write_tensors(tmp_path / f"{name}.safetensors", {"rows": torch.zeros(2, 3)}, facts)
    found = added(DiskSnapshots(tmp_path, ["first", "second"]), snapshot("third"))
    assert list(found) == list(found.keys()) == ["first", "second", "third"]
    assert [s.card.name for s in found.values()] == ["first", "second", "third"]
    assert [(n, s.card.name) for n, s in found.items()] == [(n, n) for n in found]
    assert len(found) == 3
    assert dict.__len__(found) == 1  # the others stay on disk


def test_keys_of_several_tasks_at_once_are_those_of_each() -> None:
    """Some texts are shared, and one task has none to validate with."""
    backbone = make_backbone("bert", dtype=torch.float64)
    none = Rows((), ())
    train = Rows(("good soup", "bad soup", "a long dull evening"), (0, 1, 1))
    other = Rows(("bad soup", "where is my money"), (0, 1))
    splits = [Split(train, other, none), Split(other, none, none)]
    for found, split in zip(learn_keys(backbone, splits), splits, strict=True):
        alone = learn_key(backbone, split)
        assert torch.allclose(found.vector, alone.vector, atol=1e-9)
        assert found.threshold == pytest.approx(alone.threshold, abs=1e-9)
    first, second = learn_keys(backbone, splits)
    assert not torch.allclose(first.vector, second.vector, atol=1e-3)
