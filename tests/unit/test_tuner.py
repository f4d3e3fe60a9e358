"""QTuner and the collection on disk."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qtuning import QTuner
from qtuning import collection as collection_module
from qtuning.backbones import weights_sha256
from qtuning.errors import CollectionError, ConfigError, TaskError
from qtuning.snapshots import snapshot_for
from tests.conftest import SMALL, make_backbone, make_task

THREE = ("world", "sport", "business")


def make_tuner(backbone, tasks: int = 2, **settings) -> QTuner:
    tuner = QTuner(backbone, **{**SMALL, **settings})
    for number in range(tasks):
        labels = THREE if number % 2 else ("negative", "positive")
        tuner.learn(make_task(f"task{number}", labels, rows=10, seed=number), progress=False)
    return tuner


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_learning_returns_scores_and_cost(bert) -> None:
    tuner = QTuner(bert, **SMALL)
    facts = tuner.learn(make_task("a", rows=10), progress=False)
    assert facts["task"] == "a"
    assert facts["version"] == 1
    assert 0 <= facts["validation_score"] <= 1
    assert 0 <= facts["test_score"] <= 1
    assert facts["split"] == {"train": 8, "validation": 6, "test": 6}
    assert facts["rows"] == 4
    assert facts["seconds"] > 0
    json.dumps(facts)


def test_the_backbone_and_old_tasks_stay_as_they_were(family_backbone, tmp_path: Path) -> None:
    """Same sha256 of the weights; same bytes of scores and files after every later task."""
    before = weights_sha256(family_backbone)
    tuner = QTuner(family_backbone, **SMALL)
    scores: dict[str, bytes] = {}
    files: dict[str, str] = {}
    for number in range(5):  # two of them evict
        task = make_task(f"task{number}", THREE, rows=8, seed=number)
        tuner.learn(task, progress=False)
        tuner.save_pretrained(tmp_path / "c")
        now = {k: v for k, v in hashes(tmp_path / "c").items() if k.startswith("tasks/")}
        assert files.items() <= now.items()
        files = now
        for earlier in tuner.tasks:
            texts = list(make_task(earlier, THREE, rows=8, seed=int(earlier[-1])).texts)
            found = torch.stack(tuner.predictor.log_probs(texts, [earlier] * len(texts)))
            as_bytes = found.numpy().tobytes()
            assert scores.setdefault(earlier, as_bytes) == as_bytes
    assert weights_sha256(family_backbone) == before
    assert len(scores) == 5


def test_mixed_tasks_in_one_batch_equal_one_by_one(family_backbone) -> None:
    tuner = make_tuner(family_backbone, 3)
    texts = ["good soup", "river stone blue late early lost", "bad", "awful great poor nice"] * 3
    tasks = ["task0", "task1", "task2", "task1", "task0"] * 3
    tasks = tasks[: len(texts)]
    together = tuner.predict_proba(texts, tasks)
    for text, task, found in zip(texts, tasks, together, strict=True):
        alone = tuner.predict_proba(text, task)
        assert list(alone) == list(found)
        assert max(abs(alone[k] - found[k]) for k in alone) < 1e-5
        assert tuner.predict(text, task) == max(found, key=found.get)
        assert sum(found.values()) == pytest.approx(1, abs=1e-5)
    labels = tuner.predict(texts, tasks)
    assert labels == [max(found, key=found.get) for found in together]


def test_save_load_predict(family_backbone, tmp_path: Path) -> None:
    tuner = make_tuner(family_backbone, 4)
    tuner.save_pretrained(tmp_path / "c")
    loaded = QTuner.from_pretrained(tmp_path / "c", model=family_backbone)
    texts, tasks = ["good", "bad soup"], ["task0", "task3"]
    assert tuner.predict_proba(texts, tasks) == loaded.predict_proba(texts, tasks)
    assert list(loaded.tasks) == ["task0", "task1", "task2", "task3"]


def test_learning_goes_on_after_loading_as_if_never_saved(bert, tmp_path: Path) -> None:
    straight = make_tuner(bert, 4, mlp=True, mlp_hidden=8)
    halfway = make_tuner(bert, 3, mlp=True, mlp_hidden=8)
    halfway.save_pretrained(tmp_path / "c")
    resumed = QTuner.from_pretrained(tmp_path / "c", model=bert)
    resumed.learn(make_task("task3", THREE, rows=10, seed=3), progress=False)
    for name, snapshot in straight.state.snapshots.items():
        assert torch.equal(snapshot.rows, resumed.state.snapshots[name].rows)
    assert torch.equal(straight.state.queue.rows, resumed.state.queue.rows)


def test_replacing_and_removing(bert, tmp_path: Path) -> None:
    tuner = make_tuner(bert, 2)
    tuner.save_pretrained(tmp_path / "c")
    before = hashes(tmp_path / "c")
    with pytest.raises(TaskError, match=r"'task0' is already .*replace=True"):
        tuner.learn(make_task("task0"), progress=False)
    old = tuner.state.snapshots["task0"]
    facts = tuner.learn(make_task("task0", THREE, rows=10, seed=9), replace=True, progress=False)
    assert facts["version"] == 2
    assert tuner.state.snapshots["task0"] is not old
    tuner.save_pretrained(tmp_path / "c")
    after = hashes(tmp_path / "c")
    assert "tasks/task0@2/snapshot.safetensors" in after
    assert not any(name.startswith("tasks/task0/") for name in after)
    assert after["tasks/task1/snapshot.safetensors"] == before["tasks/task1/snapshot.safetensors"]
    tuner.remove("task1")
    tuner.save_pretrained(tmp_path / "c")
    loaded = QTuner.from_pretrained(tmp_path / "c", model=bert)
    assert list(loaded.tasks) == ["task0"]
    assert loaded.predict("good") in THREE  # the only task needs no name
    with pytest.raises(TaskError, match="Unknown task 'task1'"):
        tuner.remove("task1")


def test_a_failed_learning_leaves_the_old_version(bert, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = make_tuner(bert, 1)
    before = tuner.predict_proba("good", "task0")
    monkeypatch.setattr("qtuning.tuner.fit_lanes", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tuner.learn(make_task("task0", seed=5), replace=True, progress=False)
    assert tuner.predict_proba("good", "task0") == before


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def test_a_kill_at_any_write_leaves_the_old_collection_or_the_new_one(
    bert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = make_tuner(bert, 2)
    folder = tmp_path / "c"
    tuner.save_pretrained(folder)
    old = QTuner.from_pretrained(folder, model=bert).predict_proba(["good"] * 2, ["task0", "task1"])
    tuner.learn(make_task("task1", THREE, rows=10, seed=7), replace=True, progress=False)
    tuner.learn(make_task("task2", rows=10), progress=False)
    new = tuner.predict_proba(["good"] * 2, ["task0", "task1"])
    assert new != old
    real = os.replace
    outcomes = set()
    for survived in range(8):
        calls = {"n": 0}

        def dying(source: str, target: str, limit: int = survived, calls: dict = calls) -> None:
            if calls["n"] == limit:
                raise Killed
            calls["n"] += 1
            real(source, target)

        monkeypatch.setattr("qtuning.files.os.replace", dying)
        try:
            tuner.save_pretrained(folder)
            finished = True
        except Killed:
            finished = False
        monkeypatch.setattr("qtuning.files.os.replace", real)
        opened = QTuner.from_pretrained(folder, model=bert)
        found = opened.predict_proba(["good"] * 2, ["task0", "task1"])
        assert found in (old, new)
        outcomes.add((finished, found == new))
        if found == new:
            break
    assert (False, False) in outcomes
    assert (False, True) in outcomes or (True, True) in outcomes


def test_another_writer_is_noticed(bert, tmp_path: Path) -> None:
    tuner = make_tuner(bert, 1)
    tuner.save_pretrained(tmp_path / "c")
    first = QTuner.from_pretrained(tmp_path / "c", model=bert)
    second = QTuner.from_pretrained(tmp_path / "c", model=bert)
    first.learn(make_task("x", rows=10), progress=False)
    first.save_pretrained(tmp_path / "c")
    second.learn(make_task("y", rows=10), progress=False)
    with pytest.raises(CollectionError, match=r"changed since it was opened.*overwrite=True"):
        second.save_pretrained(tmp_path / "c")
    assert list(QTuner.from_pretrained(tmp_path / "c", model=bert).tasks) == ["task0", "x"]
    second.save_pretrained(tmp_path / "c", overwrite=True)
    assert list(QTuner.from_pretrained(tmp_path / "c", model=bert).tasks) == ["task0", "y"]


def test_a_save_of_another_in_the_middle_of_reading_is_read_instead(
    bert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = make_tuner(bert, 1)
    tuner.save_pretrained(tmp_path / "c")
    real, meanwhile = collection_module._checked, [tuner]

    def checked(*asked) -> bytes:
        if meanwhile:
            other = meanwhile.pop()
            other.learn(make_task("more", rows=10), progress=False)
            other.save_pretrained(
                tmp_path / "c"
            )  # removes the state that the manifest read above names
        return real(*asked)

    monkeypatch.setattr(collection_module, "_checked", checked)
    assert list(QTuner.from_pretrained(tmp_path / "c", model=bert).tasks) == ["task0", "more"]


OTHER_COLLECTIONS = {
    "weights": ({"seed": 1}, {}, "fingerprint '.*', and the open one has '"),
    "readout": ({"readout": "cls"}, {}, "readout 'cls', and the open one has 'mean'"),
    "length": ({"max_length": 64}, {}, "max_length 64, and the open one has 128"),
    "method": ({}, {"method": "continual-finetune"}, "method 'continual-finetune', .* 'q-tuning'"),
    "seed": ({}, {"seed": 3}, "seed 3, and the open one has 0"),
    "setting": ({}, {"queue_size": 5}, "queue_size 5, and the open one has 3"),
}


@pytest.mark.parametrize("case", OTHER_COLLECTIONS.values(), ids=OTHER_COLLECTIONS)
def test_another_collection_in_the_folder_is_not_followed(bert, tmp_path: Path, case) -> None:
    of_backbone, of_tuner, message = case
    folder = tmp_path / "c"
    make_tuner(bert, 1).save_pretrained(folder)
    opened = QTuner.from_pretrained(folder, model=bert)
    before, answered = opened.state, opened.predict_proba("good", "task0")
    other = make_tuner(make_backbone("bert", **of_backbone), 1, **of_tuner)
    other.save_pretrained(folder, overwrite=True)
    saved = hashes(folder)
    for _ in range(2):  # it does not get used to it
        with pytest.raises(CollectionError, match=f"replaced by a collection with {message}.*anew"):
            opened.refresh()
    assert opened.state is before
    assert opened.predict_proba("good", "task0") == answered
    with pytest.raises(CollectionError, match="changed since it was opened"):
        opened.save_pretrained(folder)
    assert hashes(folder) == saved


def test_an_older_manifest_without_newer_settings_is_followed(bert, tmp_path: Path) -> None:
    make_tuner(bert, 1).save_pretrained(tmp_path / "c")
    opened = QTuner.from_pretrained(tmp_path / "c", model=bert)
    file = tmp_path / "c" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["settings"]["average"]  # stands for one that came later
    file.write_text(json.dumps(manifest))
    assert opened.refresh()


def test_another_backbone_is_refused(bert, tmp_path: Path) -> None:
    make_tuner(bert, 1).save_pretrained(tmp_path / "c")
    with pytest.raises(CollectionError, match=r"made for 'tiny-bert'.*other weights"):
        QTuner.from_pretrained(tmp_path / "c", model=make_backbone("bert", seed=1))


def test_older_formats_are_read_and_newer_ones_refused(
    bert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tuner(bert, 1).save_pretrained(tmp_path / "c")
    monkeypatch.setattr(collection_module, "FORMAT", 2)
    monkeypatch.setitem(collection_module.UPGRADES, 1, lambda manifest: {**manifest, "seed": 77})
    assert QTuner.from_pretrained(tmp_path / "c", model=bert).seed == 77
    monkeypatch.setattr(collection_module, "FORMAT", 0)
    with pytest.raises(CollectionError, match=r"format 1, newer than 0.*upgrade qtuning"):
        QTuner.from_pretrained(tmp_path / "c", model=bert)


def test_files_are_safetensors_and_json_only(bert, tmp_path: Path) -> None:
    make_tuner(bert, 1).save_pretrained(tmp_path / "c")
    endings = {path.suffix for path in (tmp_path / "c").rglob("*") if path.is_file()}
    assert endings == {".safetensors", ".json", ".md"}
    card = (tmp_path / "c" / "README.md").read_text()
    assert "| task0 | negative, positive |" in card


def test_score_in_its_modes(family_backbone) -> None:
    tuner = make_tuner(family_backbone, 3)
    task = make_task("task0", rows=10)
    assert 0 <= tuner.score(task) <= 1
    for mode in ("shared", "current"):
        assert 0 <= tuner.score(task, evaluate_with=mode) <= 1
    state = tuner.state
    own, last = (state.snapshots[name].rows for name in ("task0", "task2"))
    prefix = len(state.shared_prefix)
    shown = snapshot_for(state, "task0", "shared").rows
    assert torch.equal(shown[:prefix], last[:prefix])  # today's prefix, …
    assert torch.equal(shown[prefix:], own[prefix:])  # … and the rest as it was
    assert not torch.equal(last[:prefix], own[:prefix])
    strange = replace(state.snapshots["task0"], facts={"imported_from": "elsewhere"})
    imported = replace(state, snapshots={**state.snapshots, "task0": strange})
    with pytest.raises(ConfigError, match="'task0' was imported and has no prefix"):
        snapshot_for(imported, "task0", "shared")
    if family_backbone.needs_head:
        with pytest.raises(TaskError, match="is an encoder; use match='label'"):
            tuner.score(task, match="exact")
    else:
        assert tuner.score(task, match="exact") <= tuner.score(task)
    with pytest.raises(TaskError, match="was learnt with the labels"):
        tuner.score(make_task("task0", ("up", "down"), rows=10))
    with pytest.raises(ConfigError, match="Unknown part"):
        tuner.score(task, part="tset")


def test_exact_match_counts_whole_groups(bert) -> None:
    plain = make_task("grouped", rows=40)
    count = len(plain.texts)
    groups = [str(i // 4) for i in range(count)]
    marks = ["test" if i // 4 % 2 else "train" for i in range(count)]
    task = replace(plain, metric="exact-match", groups=groups, splits=marks)
    tuner = QTuner(bert, **SMALL)
    told = tuner.learn(task, progress=False)["test_score"]
    rows = task.rows("test")
    guessed = tuner.predict(list(rows.texts))
    hits = [task.label_names[y] == g for y, g in zip(rows.labels, guessed, strict=True)]
    whole = [all(hits[i : i + 4]) for i in range(0, len(hits), 4)]
    assert told == tuner.score(task) == sum(whole) / len(whole)
    assert told < sum(hits) / len(hits)


def test_what_is_no_text_is_refused_before_a_model_adapts_to_it(bert) -> None:
    tuner = QTuner(bert, method="mbpa++", **SMALL)
    tuner.learn(make_task("task0", rows=10), progress=False)
    with pytest.raises(TaskError, match="half a character"):
        tuner.predict("bad \ud83d", "task0")


def test_predict_asks_for_a_known_task_and_the_right_kind_of_text(bert) -> None:
    tuner = make_tuner(bert, 2)
    with pytest.raises(TaskError, match="Did you mean 'task"):
        tuner.predict("good", "tsk0")
    with pytest.raises(TaskError, match="takes single texts"):
        tuner.predict(("good", "bad"), "task0")
    with pytest.raises(TaskError, match="2 texts but 1 task names"):
        tuner.predict(["good", "bad"], ["task0"])
    assert tuner.predict([], "task0") == []


def test_a_collection_whose_files_are_links_opens(bert, tmp_path: Path) -> None:
    """As in a hub cache, where every file is a link to a folder beside."""
    tuner = make_tuner(bert, 1)
    tuner.save_pretrained(tmp_path / "blobs")
    for file in (tmp_path / "blobs").rglob("*"):
        if file.is_file():
            link = tmp_path / "snapshots" / file.relative_to(tmp_path / "blobs")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    loaded = QTuner.from_pretrained(tmp_path / "snapshots", model=bert)
    assert loaded.predict_proba("good", "task0") == tuner.predict_proba("good", "task0")


def test_a_kill_during_the_first_save_does_not_lock_the_folder(
    bert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = make_tuner(bert, 1)

    def dying(source: str, target: str) -> None:
        if str(target).endswith("manifest.json"):
            raise Killed
        real(source, target)

    real = os.replace
    monkeypatch.setattr("qtuning.files.os.replace", dying)
    with pytest.raises(Killed):
        tuner.save_pretrained(tmp_path / "c")
    monkeypatch.setattr("qtuning.files.os.replace", real)
    for name in (
        "tasks/task0/snapshot.safetensors",
        "tasks/task0/task.json",
        "README.md",
        "manifest.json",
    ):
        half = tmp_path / "c" / name
        tempfile.mkstemp(dir=half.parent, prefix=f".{half.name}.")  # as `write_atomic` names it
    tuner.save_pretrained(tmp_path / "c")
    assert list(QTuner.from_pretrained(tmp_path / "c", model=bert).tasks) == ["task0"]
    assert not list((tmp_path / "c").rglob(".*"))


def test_dot_files_of_the_user_stay(bert, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    tuner = make_tuner(bert, 1)
    tuner.save_pretrained(folder)
    mine = {".gitlab-ci.yml", ".env.local", ".README.md.swp"}
    for name in mine:
        (folder / name).write_text("mine")
    for name in (".venv3.11", "tasks/task0/.ipynb_checkpoints"):
        (folder / name).mkdir()
    tuner.learn(make_task("more", rows=10), progress=False)
    tuner.save_pretrained(folder)
    assert {path.name for path in folder.glob(".*")} == {*mine, ".venv3.11"}


def test_a_collection_without_a_task_can_be_saved(bert, tmp_path: Path) -> None:
    QTuner(bert, **SMALL).save_pretrained(tmp_path / "c")
    assert QTuner.from_pretrained(tmp_path / "c", model=bert).tasks == {}


def test_a_folder_of_something_else_is_not_overwritten(bert, tmp_path: Path) -> None:
    (tmp_path / "tasks" / "mine").mkdir(parents=True)
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(CollectionError, match=r"manifest\.json of something else"):
        make_tuner(bert, 1).save_pretrained(tmp_path, overwrite=True)
    assert (tmp_path / "tasks" / "mine").exists()


def test_another_readout_is_refused(bert, tmp_path: Path) -> None:
    make_tuner(bert, 1).save_pretrained(tmp_path / "c")
    other = make_backbone("bert", readout="cls")
    with pytest.raises(
        CollectionError, match="made with readout 'mean', and this backbone has 'cls'"
    ):
        QTuner.from_pretrained(tmp_path / "c", model=other)


def test_versions_never_go_back(bert, tmp_path: Path) -> None:
    make_tuner(bert, 1).save_pretrained(tmp_path / "c")
    other = make_tuner(bert, 1, epochs=3)
    other.save_pretrained(tmp_path / "c", overwrite=True)  # other bytes under the same name
    assert (tmp_path / "c" / "tasks" / "task0@2").exists()
    other.learn(make_task("more", rows=10), progress=False)
    before = hashes(tmp_path / "c" / "tasks" / "task0@2")
    other.save_pretrained(tmp_path / "c")
    assert hashes(tmp_path / "c" / "tasks" / "task0@2") == before


def test_seeds_of_numpy_are_kept_as_integers(bert, tmp_path: Path) -> None:
    import numpy as np

    tuner = QTuner(bert, seed=np.int64(3), **SMALL)
    tuner.save_pretrained(tmp_path / "c")
    assert QTuner.from_pretrained(tmp_path / "c", model=bert).seed == 3
    with pytest.raises(ConfigError, match="seed must be a whole number, got 'x'"):
        QTuner(bert, seed="x")
