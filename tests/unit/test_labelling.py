"""Files of texts: in by CSV, TSV, JSONL, Parquet or lines, out as JSONL or CSV, here and on Ray alike."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qtuning import labelling
from qtuning.errors import TaskError
from qtuning.labelling import Asked, label_file, label_on_ray, write_rows
from qtuning.tuner import QTuner
from tests.conftest import SMALL, WORDS, make_model, make_task, make_tokenizer

COUNT = 600
"""Rows of the files: three batches, the last one short."""
COLUMNS = ("id", "text", "label")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection of two tasks, `tone` and `mood`, that names its model by a relative path."""
    folder = tmp_path_factory.mktemp("labelling")
    make_model("bert").save_pretrained(folder / "model")
    make_tokenizer("bert").save_pretrained(folder / "model")
    before = Path.cwd()
    os.chdir(folder)
    try:
        tuner = QTuner("./model", device="cpu", **SMALL)
        for name in ("tone", "mood"):
            tuner.learn(make_task(name, rows=8), progress=False)
        tuner.save_pretrained("c")
    finally:
        os.chdir(before)
    return folder


def rows() -> list[dict[str, str]]:
    """Texts with commas, quotes, line breaks and unusual separators, and cells that look like numbers and dates."""
    odd = ["007", "2026-01-01", 'a "good" one, bad', "null", "good\u2028bad", "true"]
    words = [f"{WORDS[i % 40]} {WORDS[i * 7 % 40]} {'good ' * (i % 9)}".strip() for i in range(600)]
    return [
        {"id": f"{i:04d}", "text": text, "label": "x"}
        for i, text in enumerate([*odd, *words][:COUNT])
    ]


def write_table(file: Path) -> Path:
    """The rows in the format of the file's ending."""
    found = rows()
    if file.suffix == ".jsonl":
        lines = [json.dumps(row, ensure_ascii=False) for row in found]
        file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    elif file.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        parquet.write_table(pyarrow.Table.from_pylist(found), file, row_group_size=100)
    elif file.suffix == ".txt":
        file.write_text("\n".join(row["text"] for row in found), encoding="utf-8")
    else:
        with file.open("w", newline="", encoding="utf-8") as stream:
            table = csv.DictWriter(stream, COLUMNS, delimiter="\t" if "tsv" in file.name else ",")
            table.writeheader()
            table.writerows(found)
    return file


@pytest.fixture
def tuner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> QTuner:
    monkeypatch.chdir(folder)
    return QTuner.from_pretrained("c", device="cpu")


ENDINGS = ("csv", "tsv", "jsonl", "parquet", "txt")


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_row_is_answered_in_order(ending: str, tuner: QTuner, tmp_path: Path) -> None:
    found = list(label_file(tuner, Asked(write_table(tmp_path / f"in.{ending}"), "tone")))
    assert [row["text"] for row in found] == [row["text"] for row in rows()]
    own = ["text"] if ending == "txt" else ["id", "text", "given_label"]
    assert list(found[0]) == [*own, "label", "probabilities"]
    first = [row["text"] for row in rows()[:4]]
    assert [row["label"] for row in found[:4]] == tuner.predict(first, "tone")


def test_the_task_is_found_for_each_row(tuner: QTuner, tmp_path: Path) -> None:
    found = list(label_file(tuner, Asked(write_table(tmp_path / "in.csv"))))
    assert list(found[0])[-4:] == list(labelling.ANSWER)
    assert {row["task"] for row in found} <= {"tone", "mood", None}


def test_pairs_and_other_columns(tuner: QTuner, tmp_path: Path) -> None:
    task = make_task("same", rows=8)
    pairs = [(text, "good") for text in task.texts]
    from qtuning.tasks import Task

    tuner.learn(Task("same", pairs, list(task.labels)), progress=False)
    file = tmp_path / "in.csv"
    file.write_text("body,reply\ngood,bad\n")
    (found,) = label_file(tuner, Asked(file, "same", "body", "reply"))
    assert found["label"] == tuner.predict(("good", "bad"), "same")
    file.write_text("text,text_b\ngood,bad\n")
    assert next(label_file(tuner, Asked(file, "same")))["label"] == found["label"]
    with pytest.raises(TaskError, match="Unknown column 'body'"):
        list(label_file(tuner, Asked(file, "same", "body")))


def test_csv_out_has_the_same_columns_as_jsonl(tuner: QTuner, tmp_path: Path) -> None:
    asked = Asked(write_table(tmp_path / "in.csv"), "tone")
    assert write_rows(label_file(tuner, asked), tmp_path / "out.jsonl") == COUNT
    assert write_rows(label_file(tuner, asked), tmp_path / "out.csv") == COUNT
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").open(encoding="utf-8")]
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as stream:
        table = list(csv.DictReader(stream))
    for row in table:
        row["probabilities"] = json.loads(row["probabilities"])
    assert table == lines


def test_a_file_that_fails_midway_leaves_nothing(tuner: QTuner, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "good"}\n{"text": "bad", "more": 1}\n')
    with pytest.raises(TaskError, match=r"row 2 has 'more'.*write a .jsonl"):
        write_rows(label_file(tuner, Asked(file, "tone")), tmp_path / "out.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


# ── on Ray ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def cluster() -> Any:
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_same_answers_on_ray(
    ending: str, tuner: QTuner, cluster: Any, tmp_path: Path, one_thread: None
) -> None:
    asked = Asked(write_table(tmp_path / f"in.{ending}"), "tone")
    here = list(label_file(tuner, asked))
    assert list(label_on_ray(Path("c"), asked, device="cpu")) == here


@pytest.mark.ray
def test_what_is_wrong_is_said_on_ray(tuner: QTuner, cluster: Any, tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text("text\ngood\n")
    with pytest.raises(TaskError, match="Did you mean 'tone'"):
        list(label_on_ray(Path("c"), Asked(file, "tune"), device="cpu"))
    file.write_text("text\ngood\nbad, but\n")
    with pytest.raises(TaskError, match=r"labelled on Ray .*ValueError: Failed to read CSV"):
        list(label_on_ray(Path("c"), Asked(file, "tone"), device="cpu"))


@pytest.mark.ray
def test_the_command_starts_a_ray_of_its_own(folder: Path, tmp_path: Path) -> None:
    file = write_table(tmp_path / "in.csv")
    code = "import sys; from qtuning.cli import main; main()"
    for name, flags in (("here", ()), ("there", ("--ray", "--workers", "1"))):
        words = ["predict", "c", "--file", file, "--task", "tone", "--device", "cpu", *flags]
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, words), "-o", str(tmp_path / f"{name}.jsonl")],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().endswith(f"{COUNT} rows")
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()
    assert "Traceback" not in done.stderr


@pytest.fixture
def one_thread() -> Any:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
