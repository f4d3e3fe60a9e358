"""Bad input: one line that names the value and the remedy, exit code 2, nothing written."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from qtuning import cli
from qtuning.errors import CollectionError, ConfigError, QTuningError, TaskError
from qtuning.task_files import task_from_dataset
from qtuning.tasks import Task
from qtuning.tuner import QTuner
from tests.conftest import SMALL, make_backbone, make_model, make_task, make_tokenizer

LONGEST_LINE = 1000
RESTORE = "restore it from a copy"


def cases(table: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", list(table.values()), ids=list(table))


def as_csv(name: str) -> str:
    task = make_task(name, rows=8)
    rows = [f"{text},{label}" for text, label in zip(task.texts, task.labels, strict=True)]
    return "\n".join(["text,label", *rows, ""])


def set_options(settings: dict[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]


def tree(folder: Path) -> dict[str, str]:
    """Everything under a folder: the sha256 of each file, and the folders."""
    return {
        str(path.relative_to(folder)): "folder"
        if path.is_dir()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
    }


# ── what the cases share ─────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tiny models: `bert`, `other` (the same shape, other weights), `t5`."""
    folder = tmp_path_factory.mktemp("models")
    for name, kind, seed in (("bert", "bert", 0), ("other", "bert", 1), ("t5", "t5", 0)):
        make_model(kind, seed).save_pretrained(folder / name)
        make_tokenizer(kind).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def valid(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection of three tasks: `tone`, `mood`, and `same` on pairs. Copied, never changed."""
    folder = tmp_path_factory.mktemp("valid")
    pairs = [f"{word} good,{word} bad,{label}" for word in "abcdef" for label in ("yes", "no")]
    texts = {
        "tone": as_csv("tone"),
        "mood": as_csv("mood"),
        "same": "\n".join(["text,text_b,label", *pairs]),
    }
    collection = folder / "collection"
    new = ["--model", str(models / "bert"), *set_options(SMALL)]
    with pytest.MonkeyPatch.context() as patch:
        for name, text in texts.items():
            file = folder / f"{name}.csv"
            file.write_text(text)
            patch.setattr(sys, "argv", ["qtuning", "learn", str(collection), str(file), *new])
            with pytest.raises(SystemExit) as stop:
                cli.main()
            assert not stop.value.code
            new = []
    return collection


@pytest.fixture
def existing(valid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(valid, tmp_path / "existing"))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A file that could be learnt."""
    file = tmp_path / "next.csv"
    file.write_text(as_csv("next"))
    return file


Refused = Callable[..., None]


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Refused:
    """Runs the command line and checks how it refuses; what libraries log counts as output too."""

    def run(*arguments: object, says: tuple[str, ...]) -> None:
        for library in ("transformers", "huggingface_hub"):
            for handler in logging.getLogger(library).handlers:
                if type(handler) is logging.StreamHandler:
                    monkeypatch.setattr(handler, "stream", sys.stderr)
        monkeypatch.setattr(sys, "argv", ["qtuning", *map(str, arguments)])
        before = tree(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        shown = capsys.readouterr()
        assert stop.value.code == 2
        assert shown.err.startswith("error: ")
        assert shown.err.endswith("\n")
        assert len(shown.err.splitlines()) == 1
        assert len(shown.err) <= LONGEST_LINE
        assert "Traceback" not in shown.err
        for fragment in says:
            assert fragment in shown.err
        assert shown.out == ""
        assert tree(tmp_path) == before

    return run


@pytest.fixture
def refused_new(refused: Refused, models: Path, tmp_path: Path) -> Refused:
    """The same for `learn` on a new collection, which must not be there afterwards."""

    def run(file: Path, *options: str, says: tuple[str, ...], model: Path | None = None) -> None:
        start = ["learn", tmp_path / "new", file, "--model", model or models / "bert"]
        refused(*start, *set_options(SMALL), *options, says=says)
        assert not (tmp_path / "new").exists()

    return run


# ── task files ───────────────────────────────────────────────────────────────────────────────

TWO = "text,label\ngood,x\nbad,y\n"
FILES: dict[str, tuple[str, str | bytes | None, tuple[str, ...], tuple[str, ...]]] = {
    "missing-file": ("absent.csv", None, (), ("absent.csv'", "check the path")),
    "unsupported-ending": ("a.xlsx", "x", (), ("'.xlsx'", "use .csv")),
    "no-ending": ("table", "x", (), ("table: cannot read", "use .csv")),
    "missing-text-column": (
        "a.csv", TWO, ("--text", "texts"), ("a.csv", "'texts'", "Did you mean 'text'?"),
    ),
    "missing-label-column": (
        "a.csv", TWO, ("--label", "lable"), ("a.csv", "'lable'", "Did you mean 'label'?"),
    ),
    "missing-second-text-column": (
        "a.csv", TWO, ("--text-b", "reply"), ("'reply'", "Known: label, text"),
    ),
    "missing-split-column": (
        "a.csv", TWO, ("--split", "part"), ("'part'", "Known: label, text"),
    ),
    "another-separator": (
        "a.csv", "text;label\ngood;x\nbad;y\n", (), ("a.csv looks separated by ';'", "save it with commas"),
    ),
    "one-class-only": (
        "a.csv", "text,label\ngood,x\nbad,x\n", (), ("'x'", "at least two classes"),
    ),
    "empty-text": (
        "a.csv", 'text,label\ngood,x\n"  ",y\n', (), ("row 2", "empty", "remove the row"),
    ),
    "missing-label": (
        "a.csv", "text,label\ngood,x\nbad,\n", (), ("row 2", "label is missing", "fill it"),
    ),
    "row-too-short": (
        "a.csv", "text,label\ngood,x\nbad\n", (), ("row 2", "label is missing", "fill it"),
    ),
    "null-label": (
        "a.jsonl",
        '{"text": "good", "label": 1}\n{"text": "bad", "label": null}\n',
        (),
        ("row 2", "label is missing", "fill it"),
    ),
    "fractional-label": (
        "a.jsonl",
        '{"text": "good", "label": 1}\n{"text": "bad", "label": 0.5}\n',
        (),
        ("row 2", "0.5", "labels are classes"),
    ),
    "fractional-label-in-csv": (
        "a.csv", "text,label\ngood,1\nbad,0.5\n", (), ("row 2", "0.5", "labels are classes"),
    ),
    "multi-label": (
        "a.jsonl",
        '{"text": "good", "label": ["x", "y"]}\n{"text": "bad", "label": ["y"]}\n',
        (),
        ("['x', 'y']", "out of scope", "one yes/no task per label"),
    ),
    "text-that-is-a-number": (
        "a.jsonl",
        '{"text": "good", "label": 1}\n{"text": 5, "label": 0}\n',
        (),
        ("row 2", "int 5", "must be a string"),
    ),
    "label-per-row": (
        "a.csv",
        "text,label\n" + "".join(f"good,{i}\n" for i in range(30)),
        (),
        ("30 different labels", "is the label column the right one?"),
    ),
    "no-bytes": ("a.csv", "", (), ("a.csv has no rows", "give at least two per class")),
    "header-only": (
        "a.csv", "text,label\n", (), ("a.csv has no rows", "give at least two per class"),
    ),
    "not-utf8": ("a.csv", "text,label\ncafé,x\n".encode("latin-1"), (), ("byte 14", "as UTF-8")),
    "too-many-fields": (
        "a.csv", "text,label\ngood,x\nbad, but,y\n", (), ("a.csv, line 3", "quote texts"),
    ),
    "too-many-fields-after-a-text-of-two-lines": (
        "a.csv", 'text,label\n"good\ngreat",x\nbad, but,y\n', (), ("a.csv, line 4", "quote texts"),
    ),
    "mark-that-is-not-closed": (
        "a.csv",
        'text,label\ngood,x\n"bad,y\n"so so",x\n',
        (),
        ("a.csv, line 3", "must end with one", "mend it"),
    ),
    "mark-that-the-last-row-leaves-open": (
        "a.csv", 'text,label\ngood,x\n"bad,y\n', (), ("a.csv, line 3", "must end with one"),
    ),
    "mark-within-a-text-in-marks": (
        "a.csv", 'text,label\n"good" he said,x\nbad,y\n', (), ("a.csv, line 2", "be doubled"),
    ),
    "mark-that-is-not-closed-in-a-tsv": (
        "a.tsv",
        'text\tlabel\n"good" he said\tx\n"bad\ty\n"so so\tx\nfine\tx\n',
        (),
        ("a.tsv, line 3", "goes on to line 4", "mend it"),
    ),
    "quotation-over-two-rows-of-a-tsv": (
        "a.tsv", 'text\tlabel\n"good\tx\nbad"\ty\n', (), ("a.tsv, line 2", "goes on to line 3"),
    ),
    "half-a-character": (
        "a.jsonl",
        '{"text": "good", "label": 1}\n{"text": "bad \\ud83d", "label": 0}\n',
        (),
        ("row 2", "the text has half a character", "ud83d", "write it whole"),
    ),
    "half-a-character-in-a-label": (
        "a.jsonl",
        '{"text": "good", "label": "x"}\n{"text": "bad", "label": "\\ud83d"}\n',
        (),
        ("row 2", "the label has half a character", "write it whole"),
    ),
    "broken-json-line": (
        "a.jsonl",
        '{"text": "good", "label": 1}\n{"text": "bad",\n',
        (),
        ("a.jsonl, line 2", "not JSON", "JSON object"),
    ),
    "json-line-without-names": (
        "a.jsonl", '["good", 1]\n', (), ("a.jsonl, line 1", "must be a JSON object"),
    ),
    "broken-parquet": ("a.parquet", "PAR1 nonsense", (), ("a.parquet", "save it again")),
    "wrong-split-word": (
        "a.csv",
        "text,label,split\ngood,x,train\nbad,y,tset\n",
        (),
        ("row 2", "'tset'", "train, validation or test"),
    ),
    "no-rows-to-train-from": (
        "a.csv",
        "text,label,split\ngood,x,test\nbad,y,test\n",
        (),
        ("'a'", "no rows to train from", "split"),
    ),
    "class-without-rows-to-train-from": (
        "a.csv",
        "text,label,split\ngood,x,train\nbad,y,test\n",
        (),
        ("'y'", "no rows to train from", "split"),
    ),
    "file-name-that-is-no-task-name": ("my file.csv", TWO, (), ("'my file'", "Rename")),
}  # fmt: skip


@cases(FILES)
def test_a_bad_task_file_is_refused(case: Any, refused_new: Refused, tmp_path: Path) -> None:
    name, content, options, says = case
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused_new(file, *options, says=says)


def test_a_bad_task_file_leaves_an_existing_collection_alone(
    refused: Refused, existing: Path, tmp_path: Path
) -> None:
    file = tmp_path / "one.csv"
    file.write_text("text,label\ngood,x\nbad,x\n")
    refused("learn", existing, file, says=("'x'", "at least two classes"))


@cases(
    {
        "parent": "../evil",
        "subfolder": "a/b",
        "dots": "..",
        "absolute": "/tmp/evil",
        "backslash": "..\\evil",
        "hidden": ".evil",
        "newline": "a\nb",
        "empty": "",
        "very-long": "a" * 300,
    }
)
def test_a_task_name_cannot_leave_its_folder(case: str, refused_new: Refused, good: Path) -> None:
    refused_new(good, "--name", case, says=(repr(case), "Rename the task"))


# ── options of a new collection ──────────────────────────────────────────────────────────────

OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unknown-dtype": (("--dtype", "fp8"), ("'fp8'", "Known: bf16")),
    "unknown-preset": (("--preset", "smollm"), ("'smollm'", "smollm2")),
    "unknown-device": (("--device", "gpu"), ("'gpu'", "Known: cpu, cuda, mps")),
    "device-without-numbers": (("--device", "meta"), ("'meta'", "Use device 'cpu'")),
    "device-without-its-package": (("--device", "hpu"), ("'hpu'", "Use device 'cpu'")),
    "device-not-built-in": (("--device", "vulkan"), ("'vulkan'", "Use device 'cpu'")),
    "unknown-method": (("--method", "qtunning"), ("'qtunning'", "Did you mean 'q-tuning'?")),
}
SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown": ("queu_size=3", ("'queu_size'", "Did you mean 'queue_size'?")),
    "keyword-that-is-no-setting": ("device=cpu", ("'device'", "Known: average")),
    "seed-as-a-setting": ("seed=5", ("'seed'", "Known: average")),
    "no-value": ("queue_size", ("'queue_size'", "name=value")),
    "no-name": ("=3", ("''", "Known: average")),
    "word-for-a-number": (
        "prompt_length=ten",
        ("prompt_length", "'ten'", "must be a whole number"),
    ),
    "fraction-for-a-whole-number": ("epochs=1.5", ("epochs", "'1.5'", "must be a whole number")),
    "word-for-a-switch": ("mlp=yes", ("mlp", "'yes'", "true or false")),
    "huge-prompt": ("prompt_length=1000000", ("1,000,000", "Lower prompt_length")),
    "huge-batch": ("batch_size=10000000", ("10,000,000", "Lower batch_size")),
    "no-queue": ("queue_size=0", ("queue_size", "got 0", "at least 1")),
    "no-epochs": ("epochs=0", ("epochs", "got 0", "at least 1")),
    "negative-shots": ("shots=-3", ("shots", "got -3", "at least 0")),
    "negative-learning-rate": ("prompt_lr=-0.5", ("prompt_lr", "got -0.5", "at least 0")),
    "nan-learning-rate": ("prompt_lr=nan", ("prompt_lr", "got nan", "at least 0")),
    "infinite-learning-rate": ("prompt_lr=inf", ("prompt_lr", "got inf", "finite")),
    "learning-rate-beyond-float32": ("prompt_lr=1e300", ("prompt_lr", "1e+300", "Lower prompt_lr")),
    "infinite-memory-factor": ("memory_factor=inf", ("memory_factor", "got inf", "finite")),
    "unknown-eviction": ("eviction=fifa", ("'fifa'", "Did you mean 'fifo'?")),
    "unknown-retention": ("retention=mse", ("'mse'", "Known: jsd, kl, none")),
    "prompt-beyond-the-positions": (
        "prompt_length=200 queue_size=1",
        ("202 prompt vectors", "128 positions", "Lower queue_size, prompt_length"),
    ),
    "shared-prefix-beyond-the-positions": (
        "shared_length=125 queue_size=1",
        ("127 prompt vectors", "128 positions", "prompt_length or shared_length"),
    ),
    "full-queue-beyond-the-positions": (
        "queue_size=100 eviction=fifo",
        ("202 prompt vectors", "128 positions", "Lower queue_size"),
    ),
    "pca-with-too-few-components": (
        "prompt_length=20",
        ("'pca'", "40 components", "at most 32", "Lower queue_size or prompt_length"),
    ),
}


@cases(OPTIONS)
def test_a_bad_option_is_refused(case: Any, refused_new: Refused, good: Path) -> None:
    options, says = case
    refused_new(good, *options, says=says)


@cases(SETTINGS)
def test_a_bad_setting_is_refused_before_the_first_task(
    case: Any, refused_new: Refused, good: Path
) -> None:
    settings, says = case
    options = [part for setting in settings.split() for part in ("--set", setting)]
    refused_new(good, *options, says=says)


def test_pca_with_too_few_components_is_refused_at_the_latest_when_the_queue_is_full() -> None:
    def learn_four() -> None:
        tuner = QTuner(make_backbone("bert"), **{**SMALL, "prompt_length": 20})
        for name in "abcd":
            tuner.learn(make_task(name), progress=False)

    with pytest.raises(ConfigError, match=r"at most 32.*Lower queue_size") as caught:
        learn_four()
    assert "\n" not in str(caught.value)


# ── models ───────────────────────────────────────────────────────────────────────────────────


def test_half_precision_t5_is_refused(refused_new: Refused, good: Path, models: Path) -> None:
    says = ("'fp16'", "must be fp32 or bf16")
    refused_new(good, "--dtype", "fp16", model=models / "t5", says=says)


def test_a_model_the_hub_cannot_be_asked_for_is_refused(
    refused_new: Refused, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    says = ("'no-such-model'", "Give a local folder")
    refused_new(good, model=Path("no-such-model"), says=says)


def test_a_model_folder_that_is_not_there_is_refused(
    refused_new: Refused, good: Path, tmp_path: Path
) -> None:
    refused_new(good, model=tmp_path / "absent", says=("absent'", "Give a local folder"))


@cases(
    {
        "damaged-weights": ("model.safetensors", b"junk", "cannot load the model"),
        "damaged-config": ("config.json", b"{junk", "config.json"),
        "no-config": ("config.json", None, "config.json"),
        "no-tokenizer": ("tokenizer*", None, "tokenizer"),
    }
)
def test_a_damaged_model_is_refused(
    case: Any, refused_new: Refused, good: Path, models: Path, tmp_path: Path
) -> None:
    pattern, content, fragment = case
    model = tmp_path / "broken-model"
    shutil.copytree(models / "bert", model)
    for file in list(model.glob(pattern)):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
    refused_new(good, model=model, says=("broken-model'", fragment, "Give a local folder"))


# ── collections ──────────────────────────────────────────────────────────────────────────────


def flip_last_byte(pattern: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (file,) = folder.glob(pattern)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    return damage


def delete(pattern: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (file,) = folder.glob(pattern)
        file.unlink()

    return damage


def in_manifest(*keys: str, value: object) -> Callable[[Path], None]:
    """Puts a value at that place of the manifest."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        place = manifest
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def without(*keys: str) -> Callable[[Path], None]:
    """Removes that entry of the manifest."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        place = manifest
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def truncate_manifest(folder: Path) -> None:
    data = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(data[: len(data) // 2])


def climb_by_task_name(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tasks"]["../evil"] = manifest["tasks"].pop("tone")
    (folder / "manifest.json").write_text(json.dumps(manifest))


DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "snapshot-byte": (
        flip_last_byte("tasks/tone/snapshot.safetensors"),
        ("tone/snapshot.safetensors is damaged", RESTORE),
    ),
    "state-byte": (flip_last_byte("state-*"), ("state-", "is damaged", RESTORE)),
    "card-byte": (flip_last_byte("tasks/tone/task.json"), ("tone/task.json is damaged", RESTORE)),
    "snapshot-gone": (
        delete("tasks/tone/snapshot.safetensors"),
        ("tone/snapshot.safetensors cannot be read", RESTORE),
    ),
    "state-gone": (delete("state-*"), ("state-", "cannot be read", RESTORE)),
    "manifest-truncated": (truncate_manifest, ("manifest.json is damaged", RESTORE)),
    "manifest-without-tasks": (without("tasks"), ("manifest.json is damaged", RESTORE)),
    "manifest-without-model": (without("backbone", "name"), ("manifest.json is damaged", RESTORE)),
    "manifest-without-fingerprint": (
        without("backbone", "fingerprint"),
        ("manifest.json is damaged", RESTORE),
    ),
    "manifest-without-facts": (
        in_manifest("state", "facts", value={}),
        ("manifest.json is damaged", RESTORE),
    ),
    "manifest-with-a-list-of-settings": (
        in_manifest("settings", value=[]),
        ("manifest.json is damaged", RESTORE),
    ),
    "newer-format": (in_manifest("format", value=99), ("format 99", "upgrade qtuning")),
    "format-that-never-was": (in_manifest("format", value=0), ("format 0", RESTORE)),
    "state-outside": (
        in_manifest("state", "file", value="../next.csv"),
        ("'../next.csv'", "outside", RESTORE),
    ),
    "state-at-an-absolute-path": (
        in_manifest("state", "file", value="/etc/passwd"),
        ("'/etc/passwd'", "outside", RESTORE),
    ),
    "task-outside": (
        in_manifest("tasks", "tone", "folder", value="../evil"),
        ("'../evil'", "outside", RESTORE),
    ),
    "task-file-outside": (
        in_manifest("tasks", "tone", "files", "../../../next.csv", value="0" * 64),
        ("../../../next.csv'", "outside", RESTORE),
    ),
    "task-name-outside": (climb_by_task_name, ("'../evil'", "manifest.json is damaged")),
}


@cases(DAMAGE)
def test_a_damaged_collection_is_refused(
    case: Any, refused: Refused, existing: Path, good: Path
) -> None:
    damage, says = case
    damage(existing)
    refused("predict", existing, "good", "--task", "tone", says=says)
    refused("learn", existing, good, says=says)


@pytest.mark.parametrize("model", ["other", "t5"])
def test_a_collection_made_for_another_model_is_refused(
    model: str, refused: Refused, existing: Path, good: Path, models: Path
) -> None:
    in_manifest("backbone", "name", value=str(models / model))(existing)
    says = (f"{model}' has other weights", "Load the model it was made for")
    refused("predict", existing, "good", "--task", "tone", says=says)
    refused("learn", existing, good, says=says)


def test_a_collection_whose_model_is_gone_is_refused(
    refused: Refused, existing: Path, tmp_path: Path
) -> None:
    in_manifest("backbone", "name", value=str(tmp_path / "gone"))(existing)
    refused("predict", existing, "good", "--task", "tone", says=("gone'", "Give a local folder"))


def test_a_task_cannot_be_learnt_twice_by_accident(
    refused: Refused, existing: Path, good: Path
) -> None:
    refused("learn", existing, good, "--name", "tone", says=("'tone'", "rename it", "--replace"))


@cases(
    {
        "setting": ("--set", "queue_size=5"),
        "model": ("--model", "bge-small"),
        "method": ("--method", "nonsense"),
        "dtype": ("--dtype", "bf16"),
        "seed": ("--seed", "5"),
        "readout": ("--readout", "peft"),
        "preset": ("--preset", "smollm2"),
    }
)
def test_an_option_of_new_collections_is_refused_for_an_existing_one(
    case: tuple[str, str], refused: Refused, existing: Path, good: Path
) -> None:
    refused("learn", existing, good, *case, says=("existing", case[0], "new collection"))


def test_an_ordinary_folder_is_not_made_a_collection(
    refused: Refused, good: Path, models: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "letters"
    folder.mkdir()
    (folder / "dear.txt").write_text("Dear friend")
    start = ("learn", folder, good, "--model", models / "bert", *set_options(SMALL))
    refused(*start, says=("letters is not empty", "choose another folder"))


def test_a_file_is_not_made_a_collection(
    refused: Refused, good: Path, models: Path, tmp_path: Path
) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear friend")
    start = ("learn", file, good, "--model", models / "bert", *set_options(SMALL))
    refused(*start, says=("letter.txt", "choose another folder"))


# ── predicting ───────────────────────────────────────────────────────────────────────────────

PREDICTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unknown-task": (("good", "--task", "tune"), ("'tune'", "Did you mean 'tone'?")),
    "no-text": (("--task", "tone"), ("at least one text", "--file")),
    "empty-text": (("good", " ", "--task", "tone"), ("' '", "must be a non-empty string")),
    "pair-for-a-task-on-single-texts": (
        ("good", "--text-b", "bad", "--task", "tone"),
        ("('good', 'bad')", "'tone' takes single texts", "--text-b"),
    ),
    "single-text-for-a-task-on-pairs": (
        ("good", "--task", "same"),
        ("'good'", "'same' takes pairs", "--text-b"),
    ),
    "unknown-device": (("good", "--task", "tone", "--device", "gpu"), ("'gpu'", "'cpu'")),
    "output-of-another-kind": (("good", "-o", "out.xlsx"), ("'out.xlsx'", "end in .jsonl or .csv")),
    "texts-and-a-file": (("good", "--file", "inbox.txt"), ("--file", "not both")),
    "ray-without-a-file": (("good", "--ray"), ("--ray is for files", "--file")),
    "workers-without-ray": (("good", "--workers", "2"), ("--workers", "add --ray")),
}


@cases(PREDICTIONS)
def test_a_bad_prediction_is_refused(case: Any, refused: Refused, existing: Path) -> None:
    arguments, says = case
    refused("predict", existing, *arguments, says=says)


def test_a_missing_file_of_texts_is_refused(
    refused: Refused, existing: Path, tmp_path: Path
) -> None:
    file = ("--file", tmp_path / "absent.txt")
    refused("predict", existing, *file, "--task", "tone", says=("absent.txt", "check the path"))


def test_a_file_of_texts_that_is_not_utf8_is_refused(
    refused: Refused, existing: Path, tmp_path: Path
) -> None:
    (tmp_path / "inbox.txt").write_bytes("café".encode("latin-1"))
    file = ("--file", tmp_path / "inbox.txt")
    refused("predict", existing, *file, "--task", "tone", says=("inbox.txt", "save it as UTF-8"))


# ── exporting ────────────────────────────────────────────────────────────────────────────────

EXPORTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unknown-task": (("--task", "tune", "-o", "new"), ("'tune'", "Did you mean 'tone'?")),
    "unknown-format": (("--to", "onnx", "-o", "new"), ("'onnx'", "Known: embeddings, peft")),
    "usual-layout-of-an-encoder": (
        ("--task", "tone", "-o", "new"),
        ("before [CLS]", "readout='peft'", "--readout peft"),
    ),
    "folder-in-use": (("--to", "embeddings", "-o", "."), ("not an empty folder", "choose another")),
    "repository": (
        ("--to", "embeddings", "-o", "new", "--push", "a/b/c"),
        ("'a/b/c'", "owner/name"),
    ),
    "no-output": ((), ("--output", "qtuning export -h")),
}


@cases(EXPORTS)
def test_a_bad_export_is_refused(
    case: Any, refused: Refused, existing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, says = case
    monkeypatch.chdir(tmp_path)
    refused("export", existing, *arguments, says=says)


def test_the_layout_of_peft_is_refused_for_other_families(
    refused_new: Refused, good: Path, models: Path
) -> None:
    says = ("'peft' is a layout for encoders", "leave readout out")
    refused_new(good, "--readout", "peft", says=says, model=models / "t5")


TABLES: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "no-such-column": ("a.csv", "txt\ngood\n", (), ("a.csv", "'text'", "Did you mean 'txt'?")),
    "no-rows": ("a.csv", "", (), ("a.csv has no rows", "at least one text")),
    "empty-cell": ("a.csv", "text,id\n ,1\n", (), ("' '", "must be a non-empty string")),
    "empty-cell-after-many": (
        "a.csv",
        "text,id\n" + "good,1\n" * 300 + ",2\n",
        (),
        ("a.csv, row 301 (a header not counted): the text", "got ''", "leave it out"),
    ),
    "half-a-character": (
        "a.jsonl",
        '{"text": "good"}\n{"text": "bad \\ud83d"}\n',
        (),
        ("a.jsonl, row 2", "half a character", "ud83d", "write it whole"),
    ),
    "mark-that-is-not-closed": (
        "a.csv", 'text,id\ngood,1\n"bad,2\n"so so",3\n', (), ("a.csv, line 3", "mend it"),
    ),
    "broken-json-line": ("a.jsonl", '{"text": "good"}\n{"text"\n', (), ("a.jsonl, line 2", "not JSON")),
    "second-text-that-is-no-column": (
        "a.csv", "text\ngood\n", ("--text-b", "reply"), ("'reply'", "Known: text"),
    ),
}  # fmt: skip


@cases(TABLES)
def test_a_bad_table_of_texts_is_refused(
    case: Any, refused: Refused, existing: Path, tmp_path: Path
) -> None:
    name, content, options, says = case
    (tmp_path / name).write_text(content)
    words = ("--file", tmp_path / name, "--task", "tone", *options)
    refused("predict", existing, *words, "-o", tmp_path / "out.jsonl", says=says)


@pytest.mark.parametrize("make_folder", [False, True], ids=["absent", "without-manifest"])
def test_a_folder_without_a_collection_is_refused(
    make_folder: bool, refused: Refused, tmp_path: Path
) -> None:
    folder = tmp_path / "nothing"
    if make_folder:
        folder.mkdir()
    refused("predict", folder, "good", says=("nothing", "qtuning learn"))


# ── sweeps ───────────────────────────────────────────────────────────────────────────────────

SWEEPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no-stream": ((), ("streams are missing", "qtuning ls streams")),
    "unknown-stream": (("--stream", "dema"), ("'dema'", "Did you mean 'demo'?")),
    "unknown-method": (("--stream", "demo", "--method", "ewc qtuning"), ("'qtuning'", "Did you mean")),
    "unknown-setting": (("--stream", "demo", "--vary", "epoch=1,2"), ("'epoch'", "'epochs'")),
    "vary-without-values": (("--stream", "demo", "--vary", "epochs="), ("name=value", "'epochs='")),
    "varied-twice": (
        ("--stream", "demo", "--vary", "epochs=1", "--vary", "epochs=2"),
        ("names epochs twice", "after one"),
    ),
    "setting-of-the-run": (("--stream", "demo", "--set", "max_length=64"), ("max_length", "--max-length", "YAML")),
    "value-twice": (("--stream", "demo", "--vary", "epochs=1,1"), ("vary epochs", "'1' twice")),
    "value-that-is-a-word": (("--stream", "demo", "--vary", "epochs=1,few"), ("epochs", "'few'")),
    "seeds-that-are-words": (("--stream", "demo", "--seeds", "one"), ("--seeds", "'one'")),
    "missing-file": (("absent.yaml",), ("absent.yaml'", "check the path")),
    "address-without-ray": (("--stream", "demo", "--address", "auto"), ("--address", "add --ray")),
    "no-cores": (("--stream", "demo", "--cpus-per-pack", "0"), ("--cpus-per-pack", "0")),
}  # fmt: skip


@cases(SWEEPS)
def test_a_bad_sweep_is_refused(
    case: Any, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, says = case
    refused("sweep", *arguments, says=says)


def test_a_sweep_file_that_is_no_sweep_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("stream: demo\nmethods: [ewc]\n")
    refused("sweep", tmp_path / "s.yaml", says=("s.yaml", "'stream'", "Did you mean 'streams'?"))


def test_ray_that_is_not_installed_is_named(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    refused("sweep", "--stream", "demo", "--ray", says=('pip install "qtuning[ray]"', "--ray"))


# ── listing, and words the command line does not know ────────────────────────────────────────

USAGE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kind-of-ls": (("ls", "method"), ("'method'", "Did you mean 'methods'?")),
    "name-of-show": (
        ("show", "q-tunin"),
        ("'q-tunin'", "Did you mean 'q-tuning'?", "No collection"),
    ),
    "stream-of-show": (("show", "stream", "order-99"), ("Unknown stream", "'order-09'")),
    "command": (("lern",), ("'lern'", "Did you mean 'learn'?")),
    "option": (("ls", "methods", "--jsn"), ("--jsn", "--json")),
    "seed": (("learn", "new", "a.csv", "--seed", "abc"), ("'abc'", "--seed", "integer")),
    "missing-argument": (("learn", "new"), ("'file'", "qtuning learn -h")),
    "option-without-value": (("learn", "new", "a.csv", "--set"), ("--set", "argument", "-h")),
}


@cases(USAGE)
def test_an_unknown_word_is_refused(case: Any, refused: Refused) -> None:
    arguments, says = case
    refused(*arguments, says=says)


# ── from Python ──────────────────────────────────────────────────────────────────────────────

TEXTS = ["good", "bad", "fine"]
LABELS = ["x", "y", "x"]
TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "empty-name": ({"name": ""}, "got ''. Rename the task"),
    "name-that-is-no-string": ({"name": None}, "got None. Rename the task"),
    "fewer-labels-than-texts": ({"labels": ["x", "y"]}, "3 texts but 2 labels; give one label"),
    "fewer-splits-than-texts": ({"splits": ["train"]}, "3 texts but 1 entries.*give one"),
    "no-rows": ({"texts": [], "labels": []}, "no rows; give at least two"),
    "unknown-label-word-key": (
        {"label_words": {"z": "zebra"}},
        "'z', which is no label; the labels are x, y",
    ),
    "equal-label-words": (
        {"label_words": {"x": "same", "y": "same"}},
        "share the same label words.*'same'.*give each label its own",
    ),
    "empty-label-words": ({"label_words": {"x": " "}}, "label words of 'x' are empty; fill"),
    "label-words-that-are-no-mapping": (
        {"label_words": ["good", "bad"]},
        r"label_words must be a mapping.*\['good', 'bad'\]",
    ),
    "label-id-without-a-name": (
        {"labels": [0, 5, 1], "label_names": ["x", "y"]},
        "label id 5 has no name; 2 names were given.*give one",
    ),
    "negative-label-id": (
        {"labels": [0, -1, 1], "label_names": ["x", "y"]},
        "label id -1 has no name",
    ),
    "unknown-label": ({"label_names": ["x", "z"]}, "unknown label 'y'; the labels are x, z"),
    "label-name-without-rows": (
        {"label_names": ["x", "y", "z"]},
        "no row has the label 'z'; add some or remove it",
    ),
    "unknown-metric": ({"metric": "f2"}, "must be one of accuracy.*got 'f2'"),
    "texts-and-pairs": (
        {"texts": ["good", ("bad", "awful"), "fine"]},
        "mixes single texts and pairs; use one kind",
    ),
    "fractional-float32-label": (
        {"labels": np.array([1, 0.5, 1], dtype=np.float32)},
        "0.5.*is a fraction; labels are classes",
    ),
    "missing-float32-label": (
        {"labels": np.array([1, np.nan, 0], dtype=np.float32)},
        "row 2 .a header not counted.: the label is missing; fill it",
    ),
    "missing-label-of-pandas": (
        {"labels": pd.Series(["x", pd.NA, "y"], dtype="string")},
        "row 2 .a header not counted.: the label is missing; fill it",
    ),
    "more-names-than-there-can-be-labels": (
        {"label_names": [*"xy", *map(str, range(1000))]},
        "1002 different labels in 3 rows; is the label column the right one",
    ),
    "half-a-character": (
        {"texts": ["good", "bad", "fine \ud83d"]},
        r"row 3 .*: the text has half a character \('.ud83d'\); write it whole",
    ),
    "array-of-several-labels": (
        {"labels": np.array([[0, 1], [1, 0], [1, 1]])},
        "row 1 .*: got several labels.*out of scope",
    ),
}


@cases(TASKS)
def test_a_bad_task_is_refused(case: Any) -> None:
    fields, message = case
    with pytest.raises(TaskError, match=message) as caught:
        Task(**{"name": "a", "texts": TEXTS, "labels": LABELS, **fields})
    assert "\n" not in str(caught.value)


def test_a_dataset_without_the_text_column_is_refused() -> None:
    rows = [{"sentence": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)]
    with pytest.raises(TaskError, match=r"'text'.*Known: label, sentence") as caught:
        task_from_dataset(rows, "a")
    assert "\n" not in str(caught.value)


TUNERS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown-readout": ({"readout": "max"}, "'max'. Did you mean 'mean'"),
    "max-length-beyond-the-positions": ({"max_length": 4096}, "at most 128.*got 4096"),
    "max-length-too-small": ({"max_length": 4}, "at least 8, got 4"),
    "max-length-that-is-no-number": (
        {"max_length": "long"},
        "max_length must be a whole number, got 'long'",
    ),
    "setting-of-the-wrong-type": (
        {"queue_size": 2.5},
        "queue_size must be a whole number, got 2.5",
    ),
    "switch-for-a-number": ({"queue_size": True}, "queue_size must be a whole number, got True"),
}


@cases(TUNERS)
def test_a_bad_tuner_is_refused(case: Any, models: Path) -> None:
    options, message = case
    with pytest.raises(ConfigError, match=message) as caught:
        QTuner(str(models / "bert"), **options)
    assert "\n" not in str(caught.value)


def test_a_collection_is_not_opened_with_another_model(existing: Path, models: Path) -> None:
    with pytest.raises(
        CollectionError, match=r"other' has other weights.*Load the model"
    ) as caught:
        QTuner.from_pretrained(existing, model=str(models / "other"))
    assert "\n" not in str(caught.value)


def test_a_collection_is_not_overwritten_by_accident(existing: Path, models: Path) -> None:
    tuner = QTuner(str(models / "bert"), **SMALL)
    before = tree(existing)
    with pytest.raises(CollectionError, match=r"existing already holds.*overwrite=True") as caught:
        tuner.save_pretrained(existing)
    assert "\n" not in str(caught.value)
    assert tree(existing) == before


CALLS: dict[str, tuple[Callable[[QTuner], object], str]] = {
    "fewer-tasks-than-texts": (
        lambda tuner: tuner.predict(["good", "bad"], ["tone"]),
        "2 texts but 1 task names; give one per text",
    ),
    "text-that-is-a-number": (
        lambda tuner: tuner.predict([5], "tone"),
        "must be a non-empty string, got 5",
    ),
    "half-a-character": (
        lambda tuner: tuner.predict(["good", "bad \ud83d"], "tone"),
        r"half a character \('.ud83d'\); write it whole",
    ),
    "half-a-character-of-no-told-task": (
        lambda tuner: tuner.predict("bad \ud83d"),
        "half a character",
    ),
    "forget-an-unknown-task": (lambda tuner: tuner.remove("ton"), "'ton'. Did you mean 'tone'"),
    "score-an-unknown-part": (
        lambda tuner: tuner.score(make_task("tone"), part="tset"),
        "'tset'. Did you mean 'test'",
    ),
    "score-other-labels": (
        lambda tuner: tuner.score(make_task("tone", ("no", "yes"))),
        "learnt with the labels negative, positive; these rows have no, yes",
    ),
    "exact-match-of-an-encoder": (
        lambda tuner: tuner.score(make_task("tone"), match="exact"),
        "is an encoder; use match='label'",
    ),
}


@cases(CALLS)
def test_a_bad_call_is_refused(case: Any, valid: Path) -> None:
    call, message = case
    tuner = QTuner.from_pretrained(valid)
    with pytest.raises(QTuningError, match=message) as caught:
        call(tuner)
    assert "\n" not in str(caught.value)
