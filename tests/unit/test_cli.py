"""The commands, in process, on tiny models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qtuning import QTuner, __version__
from qtuning.cli import KINDS, main
from qtuning.presets import get_preset
from tests.conftest import make_model, make_task, make_tokenizer

SETTINGS = ["prompt_length=2", "shared_length=2", "queue_size=2", "epochs=1", "shots=4"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("bert").save_pretrained(folder)
    make_tokenizer("bert").save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def call(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["qtuning", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr()
        assert ended.value.code in (0, None), out.err
        return out.out

    return call


def write_csv(path: Path, name: str = "a") -> Path:
    task = make_task(name, rows=10)
    lines = [f"{text},{label}" for text, label in zip(task.texts, task.labels, strict=True)]
    path.write_text("text,label\n" + "\n".join(lines) + "\n")
    return path


def test_a_preset_gives_a_new_collection_its_settings(run, model_folder: Path, tmp_path) -> None:
    own = ["--set", "epochs=1", "--set", "queue_size=2", "--set", "prompt_length=2"]
    run(
        "learn", tmp_path / "c", write_csv(tmp_path / "a.csv"), "--model", model_folder,
        "--preset", "minilm-tuned", "--method", "per-task-prompt", *own,
    )  # fmt: skip
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    expected = {**get_preset("minilm-tuned", "per-task-prompt"), "epochs": 1, "queue_size": 2}
    expected["prompt_length"] = 2
    assert expected["prompt_lr"] == 0.03  # that method's own
    assert {name: manifest["settings"][name] for name in expected} == expected


def test_learn_predict_show(run, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    options = [word for pair in SETTINGS for word in ("--set", pair)]
    first = run(
        "learn", folder, write_csv(tmp_path / "first.csv"), "--model", model_folder, *options
    )
    assert "learnt first from 8 texts" in first
    assert "note: no test rows were given" in " ".join(first.split())
    facts = json.loads(
        run("learn", folder, write_csv(tmp_path / "b.csv", "b"), "--name", "second", "--json")
    )
    assert facts["task"] == "second"
    assert facts["rows"] == 6
    answer = run("predict", folder, "good soup", "bad", "--task", "first")
    assert [line.split("\t")[0] in ("negative", "positive") for line in answer.splitlines()] == [
        True
    ] * 2
    (tmp_path / "texts.txt").write_text("good\n\nbad\n")
    lines = run("predict", folder, "--file", tmp_path / "texts.txt", "--task", "second", "--json")
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [row["text"] for row in rows] == ["good", "bad"]
    assert sum(rows[0]["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    shown = run("show", folder)
    assert "2 tasks" in shown
    assert "second" in shown
    assert set(json.loads(run("show", folder, "--json"))["tasks"]) == {"first", "second"}
    again = run("learn", folder, tmp_path / "first.csv", "--replace")
    assert "now knows 2 tasks" in " ".join(again.split())


def learn_meanwhile(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Let `change` happen while the next task is learnt."""
    real, changes = QTuner.learn, [change]

    def learn(self, *given, **how):
        if changes:
            changes.pop()()
        return real(self, *given, **how)

    monkeypatch.setattr(QTuner, "learn", learn)


def test_a_task_joins_what_others_saved_while_it_was_learnt(
    run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"
    new = ["--model", model_folder, *(word for pair in SETTINGS for word in ("--set", pair))]

    def other() -> None:
        run("learn", folder, write_csv(tmp_path / "theirs.csv"), *([] if folder.exists() else new))

    learn_meanwhile(monkeypatch, other)  # both make the collection
    said = run("learn", folder, write_csv(tmp_path / "ours.csv"), *new)
    assert "note: the collection was changed meanwhile" in " ".join(said.split())
    assert "now knows 2 tasks" in " ".join(said.split())
    learn_meanwhile(monkeypatch, lambda: run("learn", folder, tmp_path / "theirs.csv", "--replace"))
    facts = json.loads(run("learn", folder, tmp_path / "ours.csv", "--replace", "--json"))
    assert facts["version"] == 2
    assert "the collection was changed meanwhile" in facts["notes"][-1]
    tuner = QTuner.from_pretrained(folder)
    assert {name: tuner.version(name) for name in tuner.tasks} == {"theirs": 2, "ours": 2}
    assert not list(tmp_path.glob("c-*"))


def test_what_cannot_join_is_kept_beside(
    run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    folder = tmp_path / "c"
    options = [word for pair in SETTINGS for word in ("--set", pair)]
    run("learn", folder, write_csv(tmp_path / "a.csv"), "--model", model_folder, *options)
    file = write_csv(tmp_path / "b.csv")
    learn_meanwhile(monkeypatch, lambda: run("learn", folder, file))
    monkeypatch.setattr(sys, "argv", ["qtuning", "learn", str(folder), str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "a task named 'b' is already in the collection; rename it, or replace it" in said
    (kept,) = tmp_path.glob("c-b-*")
    assert f"What was learnt is kept in {kept}; use that collection" in said
    assert list(QTuner.from_pretrained(kept).tasks) == ["a", "b"]


@pytest.mark.parametrize("kind", KINDS)
def test_ls_prints_names_and_descriptions(run, kind: str) -> None:
    entries = json.loads(run("ls", kind, "--json"))
    assert entries
    for entry in entries:
        assert entry["name"]
        assert len(entry["description"].splitlines()) == 1
    assert entries[0]["name"] in run("ls", kind)


def test_ls_alone_lists_the_kinds(run) -> None:
    counts = json.loads(run("ls", "--json"))
    assert counts["methods"] == len(json.loads(run("ls", "methods", "--json")))
    assert f"{counts['streams']}  qtuning ls streams" in run("ls")


def test_ls_methods_says_what_a_table_needs(run) -> None:
    for entry in json.loads(run("ls", "methods", "--json")):
        assert {"paper", "families", "forgets", "stores_data", "packable"} <= set(entry)


def test_show_names_env_version_and_help(run) -> None:
    assert json.loads(run("show", "q-tuning"))["kind"] == "method"
    assert json.loads(run("show", "demo"))["kind"] == "stream"
    assert json.loads(run("env", "--json"))["qtuning"] == __version__
    assert "torch" in run("env")
    assert run("--version").strip() == __version__
    for command in ("demo", "learn", "predict", "ls", "show", "env"):
        assert "Example" in run(command, "--help")
