from __future__ import annotations

import csv
import json
import time
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qtuning import streams
from qtuning.errors import ConfigError, TaskError
from qtuning.tasks import Task

TEXTS = [f"text {i}" for i in range(60)]
LABELS = ["a", "b", "c"] * 20


def test_lists_are_enough() -> None:
    task = Task("tone", TEXTS, LABELS)
    assert task.label_names == ("a", "b", "c")
    assert task.label_ids[:4] == (0, 1, 2, 0)
    assert task.label_words == {"a": "a", "b": "b", "c": "c"}
    assert not task.is_pair


def test_arrays_and_series_are_like_lists() -> None:
    pairs, ids = [("x", "y"), ("y", "x")] * 4, [0, 1] * 4
    marks, groups = ["train", "test"] * 4, list("aabbccdd")
    listed = Task("t", pairs, ids, splits=marks, groups=groups)
    arrays = [np.array(values) for values in (pairs, ids, marks, groups)]
    series = [pd.Series(values, index=range(8, 0, -1)) for values in (pairs, ids, marks, groups)]
    for texts, labels, splits, grouped in (arrays, series):
        task = Task("t", texts, labels, splits=splits, groups=grouped)
        assert task == listed
        assert {type(part) for text in task.texts for part in text} == {str}


def test_checks_take_as_long_for_every_row() -> None:
    """Quadratic, 20,000 rows took more than five seconds."""
    texts, labels = [f"t{i}" for i in range(20_000)], [f"l{i}" for i in range(20_000)]
    for names in ((), labels):
        began = time.process_time()
        with pytest.raises(TaskError, match="20000 different labels in 20000 rows"):
            Task("t", texts, labels, label_names=names)
        assert time.process_time() - began < 1


def test_ids_with_names_and_label_words() -> None:
    task = Task("t", ["x", "y"], [1, 0], label_names=["not_ok", "ok"], label_words={"ok": "yes"})
    assert task.labels == ("ok", "not_ok")
    assert task.label_words == {"not_ok": "not ok", "ok": "yes"}


@pytest.mark.parametrize("shots", [1, 4, 8])
def test_split_is_stratified_disjoint_and_repeatable(shots: int) -> None:
    task = Task("tone", TEXTS, LABELS)
    split = task.split(shots, seed=3)
    assert Counter(split.train.labels) == {0: shots, 1: shots, 2: shots}
    parts = [set(part.texts) for part in (split.train, split.validation, split.test)]
    assert sum(map(len, parts)) == len(set.union(*parts))
    assert set.union(*parts) == set(TEXTS)
    assert split == task.split(shots, seed=3)
    assert split != task.split(shots, seed=4)


def test_split_is_the_same_on_every_machine() -> None:
    """Golden: a change here changes every published split."""
    split = Task("tone", TEXTS, LABELS).split(2, seed=0)
    assert split.train.texts == ("text 13", "text 18", "text 32", "text 47", "text 49", "text 54")


def test_validation_limit() -> None:
    split = Task("tone", TEXTS, LABELS).split(4, validation_limit=3)
    assert Counter(split.validation.labels) == {0: 3, 1: 3, 2: 3}
    assert split.sizes == {"train": 12, "validation": 9, "test": 39}


def test_marked_rows_stay_in_their_part() -> None:
    marks = ["train"] * 30 + ["validation"] * 12 + ["test"] * 18
    task = Task("tone", TEXTS, LABELS, splits=marks)
    split = task.split(4)
    assert set(split.train.texts) < set(TEXTS[:30])
    assert set(split.validation.texts) == set(TEXTS[30:42])
    assert set(split.test.texts) == set(TEXTS[42:])
    assert split.notes == ()


def test_without_validation_rows_the_spare_training_rows_serve() -> None:
    marks = ["train"] * 30 + ["test"] * 30
    split = Task("tone", TEXTS, LABELS, splits=marks).split(4)
    assert split.sizes == {"train": 12, "validation": 18, "test": 30}
    assert not set(split.train.texts) & set(split.validation.texts)


def test_a_class_without_marked_rows_does_not_lend_its_training_rows() -> None:
    marks = ["train"] * 20 + ["validation"] * 10 + ["test"] * 10 + ["train"] * 20
    task = Task("tone", TEXTS, ["a"] * 40 + ["b"] * 20, splits=marks)
    split = task.split(4)
    assert Counter(split.validation.labels) == {0: 10}
    assert Counter(split.test.labels) == {0: 10}


def test_nothing_left_for_validation_is_said() -> None:
    marks = ["train"] * 12 + ["test"] * 48
    split = Task("tone", TEXTS, LABELS, splits=marks).split(4)
    assert split.sizes["validation"] == 0
    assert any("no rows are left for validation" in note for note in split.notes)


def test_a_short_class_is_shared_out_and_said() -> None:
    task = Task("tone", TEXTS[:26], ["a"] * 20 + ["b"] * 6)
    split = task.split(16)
    counts = Counter(split.train.labels)
    assert counts == {0: 16, 1: 4}
    assert Counter(split.validation.labels)[1] == Counter(split.test.labels)[1] == 1
    assert "class 'b' has 6 rows to train from: 4 taken, not 16" in split.notes
    tiny = Task("tone", TEXTS[:4], ["a", "a", "b", "b"]).split(16)
    assert tiny.sizes["train"] == 4


def test_all_rows_with_zero_shots() -> None:
    split = Task("tone", TEXTS, LABELS).split(0)
    assert split.sizes == {"train": 36, "validation": 12, "test": 12}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_file_format_gives_the_same_task(tmp_path: Path) -> None:
    rows = [{"text": "so, good", "label": "yes"}, {"text": "bad\tday", "label": "no"}] * 2
    files = [
        write(tmp_path / "t.csv", "text,label\n" + '"so, good",yes\nbad\tday,no\n' * 2),
        write(tmp_path / "t.tsv", "text\tlabel\n" + 'so, good\tyes\n"bad\tday"\tno\n' * 2),
        write(tmp_path / "t.jsonl", "\n".join(json.dumps(row) for row in rows) + "\n\n"),
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    tasks = [Task.from_csv(file) for file in [*files, tmp_path / "t.parquet"]]
    tasks.append(Task.from_dataset(datasets.Dataset.from_list(rows), "t"))
    assert all(task == tasks[0] for task in tasks)
    assert tasks[0].name == "t"
    assert tasks[0].texts[:2] == ("so, good", "bad\tday")


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_texts_of_several_lines_are_read_as_they_were_written(ending: str, tmp_path: Path) -> None:
    texts = [
        "one,\ntwo",
        'a "good", one\r\n',
        '"',
        ",\n",
        "\na\n\n",
        '"so" he said',
        "x\u2028\ty",
    ] * 2
    mark = "," if ending == "csv" else "\t"
    with (tmp_path / f"t.{ending}").open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, delimiter=mark).writerows(
            [("text", "label"), *zip(texts, "ab" * 7, strict=True)]
        )
    task = Task.from_file(tmp_path / f"t.{ending}")
    assert task.texts == tuple(texts)
    assert task.labels == tuple("ab" * 7)


def test_marks_in_a_tsv_may_be_characters_like_others(tmp_path: Path) -> None:
    rows = 'text\tlabel\nthe "good" one\tx\n"so" he said\ty\nthe 5" one\tx\n'
    task = Task.from_file(write(tmp_path / "t.tsv", rows))
    assert (len(task.texts), task.labels) == (3, ("x", "y", "x"))


def test_columns_pairs_and_splits(tmp_path: Path) -> None:
    file = write(
        tmp_path / "nli.csv",
        "premise,claim,verdict,part\na b,c,yes,train\nd,e f,no,train\ng,h,yes,dev\ni,j,no,test\n",
    )
    task = Task.from_csv(file, "nli", text="premise", text_b="claim", label="verdict", split="part")
    assert task.is_pair
    assert task.texts[0] == ("a b", "c")
    assert task.splits == ("train", "train", "validation", "test")


def test_class_labels_and_splits_of_datasets() -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    part = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features)
    task = Task.from_dataset(datasets.DatasetDict({"train": part, "test": part}), "t")
    assert task.label_names == ("neg", "pos")
    assert task.splits == ("train", "train", "test", "test")


def test_errors_name_the_row() -> None:
    with pytest.raises(TaskError, match=r"row 2 .a header not counted.: the text is empty"):
        Task("t", ["x", " "], ["a", "b"])
    with pytest.raises(TaskError, match=r"row 1 .*: got several labels .* out of scope"):
        Task("t", ["x", "y"], [["a", "b"], ["a"]])


def test_texts_in_two_parts_are_told_of() -> None:
    texts = ["good", "fine", "bad", "awful", "good", "bad", "good"]
    labels = ["up", "up", "down", "down", "up", "down", "up"]
    marks = ["train"] * 4 + ["test", "validation", "test"]
    split = Task("twice", texts, labels, splits=marks).split(2)
    notes = [note for note in split.notes if "flatters" in note]
    assert notes == [
        "1 of 1 validation texts stand among those to train from, too: their score flatters",
        "2 of 2 test texts stand among those to train from, too: their score flatters",
    ]


def test_a_bad_stream_of_the_catalog_troubles_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {"name": "bad", "version": 1, "description": "a slip", "tasks": ["tonne"]}
    true = streams._read_folder
    more = {"streams": {"bad": raw}}
    monkeypatch.setattr(streams, "_read_folder", lambda kind: {**true(kind), **more.get(kind, {})})
    assert streams.get_stream("starter").tasks
    with pytest.raises(ConfigError, match=r"streams/bad.yaml: Unknown task 'tonne'"):
        streams.get_stream("bad")


def test_labels_that_differ_in_case_alone_are_told_of() -> None:
    words = {"yes": "yes", "Yes": "Yes", "no": "no"}
    task = Task("t", [f"text {i}" for i in range(12)], ["yes", "Yes", "no"] * 4, label_words=words)
    assert (
        "the labels Yes, yes differ in case alone; are they meant to be several?"
        in task.split(2).notes
    )
