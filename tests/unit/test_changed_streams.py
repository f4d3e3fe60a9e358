"""A stream of the user's own tables: what changed since a run is told of, what cannot be run is refused at once."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from qtuning.errors import ConfigError, RecordError, TaskError
from qtuning.runs import RunConfig, read_run_config, run
from qtuning.sweep import expand, read_sweep
from tests.conftest import SMALL, make_model, make_task, make_tokenizer


class Stopped(Exception):
    """What ends a run in its middle."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A tiny model, three tables, and a stream of the first two."""
    make_model("bert").save_pretrained(tmp_path / "model")
    make_tokenizer("bert").save_pretrained(tmp_path / "model")
    for seed, name in enumerate(("soup", "bread", "fish")):
        write_table(tmp_path / f"{name}.csv", seed)
    write_stream(tmp_path, "soup", "bread")
    return tmp_path


def write_table(path: Path, seed: int, splits: bool = False) -> None:
    task = make_task("any", rows=8, seed=seed)
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as stream:
        lines = csv.writer(stream)
        lines.writerow(["text", "label", *(["split"] if splits else [])])
        for i, (text, label) in enumerate(zip(task.texts, task.labels, strict=True)):
            lines.writerow(
                [text, label, *([("train", "validation")[i // 2 % 2]] if splits else [])]
            )


def write_stream(place: Path, *names: str) -> None:
    lines = "\n".join(f"  - {place / name}.csv" for name in names)
    text = f"name: menu\nversion: 1\ndescription: own tables\ntasks:\n{lines}\n"
    (place / "menu.yaml").write_text(text)


def learn(place: Path, **options: Any) -> dict[str, Any]:
    config = RunConfig(
        str(place / "menu.yaml"), model=str(place / "model"), settings={**SMALL, "epochs": 1}
    )
    return run(config, [0], place / "runs", **options)[0]


def stop(*_: Any) -> None:
    raise Stopped


def test_a_finished_run_answers_for_the_tasks_that_it_learnt(place: Path) -> None:
    first = learn(place)
    assert learn(place) == first
    write_stream(place, "soup", "bread", "fish")
    with pytest.raises(RecordError, match=r"is the record of other tasks or texts than .*menu\.yaml"):  # fmt: skip
        learn(place)
    write_stream(place, "bread", "soup")  # another order is another stream
    with pytest.raises(RecordError, match="other tasks or texts"):
        learn(place)
    write_stream(place, "soup", "bread")
    assert learn(place) == first
    write_table(place / "soup.csv", seed=7)
    with pytest.raises(RecordError, match="remove it, or choose another output folder"):
        learn(place)
    (place / "soup.csv").unlink()  # what was learnt of it stands
    assert learn(place) == first


def test_a_run_does_not_go_on_with_other_tasks(place: Path) -> None:
    write_stream(place, "soup", "bread", "fish")
    with pytest.raises(Stopped):
        learn(place, after_task=stop)
    write_stream(place, "bread", "soup", "fish")
    with pytest.raises(RecordError, match="was begun with other tasks or texts"):
        learn(place)
    write_stream(place, "soup", "bread", "fish")
    write_table(place / "fish.csv", seed=9)  # not learnt yet, but its rows were drawn
    with pytest.raises(RecordError, match="remove the folder to begin again"):
        learn(place)
    write_table(place / "fish.csv", seed=2)
    assert list(learn(place)["tasks"]) == ["soup", "bread", "fish"]


def test_tasks_of_a_stream_have_names_of_their_own(place: Path) -> None:
    write_table(place / "other" / "soup.csv", seed=5)
    write_stream(place, "soup", "bread", "other/soup")
    with pytest.raises(ConfigError, match="two tasks of the stream are named 'soup'"):
        learn(place)


def test_a_task_without_test_rows_is_refused_before_anything_is_learnt(place: Path) -> None:
    write_table(place / "fish.csv", seed=2, splits=True)
    write_stream(place, "soup", "fish")
    learnt: list[str] = []
    with pytest.raises(TaskError, match=r"task 'fish' has no row left to test with \(.*'test': 0"):
        learn(place, after_task=lambda task, runs: learnt.append(task.name))
    assert not learnt


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"test_limit": -5}, "test_limit must be a whole number, or 0 for all, got -5"),
        ({"test_limit": True}, "test_limit must be a whole number"),
        ({"inner_rows": -3}, "inner_rows must be a whole number, or 0 for none, got -3"),
        ({"max_length": "long"}, "max_length must be a whole number, got 'long'"),
        ({"settings": ["a", "b"]}, "settings must be a mapping of settings to values"),
        ({"stream": 5}, "stream must be a name or a file, got 5"),
        ({"model": 7}, "model must be a name or a folder, got 7"),
        ({"dtype": "fp99"}, "Unknown dtype 'fp99'"),
        ({"readout": "zz"}, "Unknown readout 'zz'"),
    ],
)
def test_values_of_a_wrong_kind_are_refused(given: dict[str, Any], message: str) -> None:
    raw = {"stream": "demo", **given}
    with pytest.raises(ConfigError) as refused:
        read_run_config(raw, "run.yaml").resolved()
    assert message in str(refused.value)


def test_all_test_rows_may_be_said_in_a_file() -> None:
    assert read_run_config({"stream": "demo", "test_limit": "all"}, "run.yaml").test_limit == 0
    (pack,) = expand(read_sweep({"streams": "demo", "test_limit": "all"}, "sweep.yaml"))
    assert pack.config.test_limit == 0
