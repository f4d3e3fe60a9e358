"""Killed anywhere and continued: the same bytes as a run that was not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from qtuning import records
from qtuning.errors import QTuningError, RecordError
from qtuning.report.gather import gather
from qtuning.runs import RunConfig, run, run_together
from qtuning.stream_loop import StreamRun
from qtuning.tasks import Task
from tests.conftest import make_model, make_tokenizer

STREAM = ("spam", "tone", "urgency", "sentiment-travel")
SETTINGS = ("epochs=3", "prompt_length=2", "shared_length=2", "queue_size=2", "shots=4", "memory_factor=0.5",
            "validation_limit=4", "mlp=true", "mlp_hidden=8")  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, a stream of four starter tasks, and the run that nobody killed."""
    folder = tmp_path_factory.mktemp("resume")
    make_model("bert").save_pretrained(folder / "model")
    make_tokenizer("bert").save_pretrained(folder / "model")
    lines = "\n".join(f"  - {name}" for name in STREAM)
    (folder / "four.yaml").write_text(
        f"name: four\nversion: 1\ndescription: four tasks\ntasks:\n{lines}\n"
    )
    start(folder, "whole").wait(timeout=300)
    assert contents(folder / "whole")
    return folder


def start(folder: Path, output: str, *extra: str) -> subprocess.Popen[bytes]:
    options = [word for pair in SETTINGS for word in ("--set", pair)]
    return subprocess.Popen(
        [sys.executable, "-c", "from qtuning.cli import main; main()", "run", "--stream", "four.yaml",
         "--model", "model", "--seeds", "0 1", "--test-limit", "8", "--show", "quiet", "--device", "cpu",
         "--output", output, *options, *extra],
        cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def contents(root: Path) -> dict[str, object]:
    """What must be the same: matrices, per-task scores, and every byte of the finished tasks."""
    found: dict[str, object] = {}
    for result in sorted(root.glob("*/*/*/result.json")):
        record = json.loads(result.read_text())
        found[f"{result.parent.name} matrix"] = json.dumps(record["matrix"])
        for file in sorted((result.parent / "tasks").iterdir()):
            found[f"{result.parent.name} {file.name}"] = file.read_bytes()
    return found


def killed_and_continued(folder: Path, seed: int) -> int:
    """Kill at random moments until the run ends by itself; returns how often it was killed."""
    rng = random.Random(seed)
    output = f"killed-{seed}"
    kills = 0
    while True:
        process = start(folder, output)
        began = time.perf_counter()
        root = folder / output
        while (
            not root.exists() and process.poll() is None
        ):  # imports take most of the time; wait for work
            time.sleep(0.01)
        limit = rng.uniform(0, 2.5) if kills < 3 else 1000
        while process.poll() is None and time.perf_counter() - began < 120:
            limit -= 0.005
            if limit < 0:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.005)
        code = process.wait(timeout=120)
        if code == 0:
            return kills
        assert code == -signal.SIGKILL, process.stderr.read()


def check_kills(place: Path, wanted: int, first_seed: int) -> None:
    expected = contents(place / "whole")
    kills, seed = 0, first_seed
    while kills < wanted:
        kills += killed_and_continued(place, seed)
        assert contents(place / f"killed-{seed}") == expected
        shutil.rmtree(place / f"killed-{seed}")
        seed += 1


def test_three_kills(place: Path) -> None:
    check_kills(place, 3, 0)


@pytest.mark.slow
def test_fifty_kills(place: Path) -> None:
    check_kills(place, 50, 100)


class Going:
    """Runs of a stream of four tasks that are stopped after some of them, again and again."""

    def __init__(self, folder: Path):
        settings = {"epochs": 1, "shots": 2, "prompt_length": 2, "shared_length": 2}
        limits = {"test_limit": 2, "inner_rows": 0}
        self.config = RunConfig("starter-four", model="minilm", settings=settings, **limits)
        self.folder = folder

    def on(self, seeds: Sequence[int], tasks: int = 99) -> list[int]:
        """Tasks that each run had behind it; it is stopped after `tasks`."""
        standing: list[list[int]] = []

        def stop(task: Task, runs: Sequence[StreamRun]) -> None:
            if runs[0].done == tasks:
                raise KeyboardInterrupt

        noted = lambda backbone, runs: standing.append([run.done for run in runs])  # noqa: E731
        with contextlib.suppress(KeyboardInterrupt):
            run(self.config, seeds, self.folder, after_task=stop, started=noted, device="cpu")
        return standing[0]


@pytest.fixture
def going(tmp_path: Path) -> Going:
    return Going(tmp_path)


def test_a_torn_log_is_mended(going: Going) -> None:
    going.on([0], tasks=2)
    (log,) = going.folder.rglob("events.jsonl")
    whole = log.read_text()
    log.write_text(whole + '{"event": "epo')
    assert going.on([0], tasks=3) == [2]
    assert log.read_text().startswith(whole)
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()].count("task") == 3


def test_a_log_that_lost_its_end_is_named(going: Going) -> None:
    going.on([0], tasks=1)
    (log,) = going.folder.rglob("events.jsonl")
    log.write_bytes(log.read_bytes()[:-15])
    with pytest.raises(
        RecordError, match=rf"{log} is shorter than at the last commit.*begins anew"
    ):
        going.on([0])


def test_new_company_is_told_what_it_costs(going: Going) -> None:
    """Alone, beside another, alone again; and both, each alone, both again."""
    assert going.on([0], tasks=1) == [0]
    with pytest.warns(UserWarning, match="1 of the 2 runs .* begun in other company: all begin"):
        assert going.on([0, 1], tasks=1) == [0, 0]
    with pytest.warns(UserWarning, match="1 of the 1 runs .* again in other company since: all"):
        assert going.on([0], tasks=1) == [0]
    with pytest.warns(UserWarning, match="2 of the 2 runs .* again in other company since: all"):
        assert going.on([0, 1], tasks=1) == [0, 0]


def test_a_removed_folder_takes_its_pack_with_it(going: Going) -> None:
    going.on([0, 1], tasks=1)
    (folder,) = going.folder.rglob("1-*")
    shutil.rmtree(folder)
    with pytest.warns(
        UserWarning, match=rf"1 of the 2 runs .* \({folder.name}\) were removed: all"
    ):
        assert going.on([0, 1], tasks=1) == [0, 0]
    for folder in going.folder.glob("*/*/*-*/"):
        shutil.rmtree(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert going.on([0, 1], tasks=1) == [0, 0]  # nothing is lost that was there


def test_a_finished_run_answers_at_once_and_does_nothing_again(place: Path) -> None:
    before = {
        path: path.stat().st_mtime_ns for path in (place / "whole").rglob("*") if path.is_file()
    }
    process = start(place, "whole")
    assert process.wait(timeout=120) == 0
    assert {
        path: path.stat().st_mtime_ns for path in (place / "whole").rglob("*") if path.is_file()
    } == before


def test_a_kill_between_two_results_learns_nothing_again(place: Path) -> None:
    """The run whose result is missing takes it from what its pack committed."""
    root = place / "between"
    shutil.copytree(place / "whole", root)
    next(root.glob("*/*/1-*/result.json")).unlink()
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.safetensors")}
    assert start(place, "between").wait(timeout=120) == 0
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.safetensors")} == before
    assert contents(root) == contents(place / "whole")


def test_nothing_finished_is_done_again(place: Path) -> None:
    """A run killed after its second task leaves that task's files as they are."""
    process = start(place, "cut")
    while (
        len(list((place / "cut").glob("*/*/*/tasks/*.safetensors"))) < 4 and process.poll() is None
    ):
        time.sleep(0.005)
    process.kill()
    process.wait()
    done = [p for p in (place / "cut").glob("*/*/*/tasks/*.safetensors") if p.stem == STREAM[0]]
    before = {path: path.stat().st_mtime_ns for path in done}
    assert len(before) == 2
    assert start(place, "cut").wait(timeout=300) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == before
    assert contents(place / "cut") == contents(place / "whole")
    lines = next((place / "cut").glob("*/*/0-*/events.jsonl")).read_text().splitlines()
    tasks = [event["task"] for event in map(json.loads, lines) if event["event"] == "task"]
    assert tasks == list(STREAM)


@pytest.mark.parametrize("method", ["replay", "multi-task", "per-task-finetune"])
def test_methods_that_train_weights_go_on_where_they_stopped(place: Path, method: str) -> None:
    """With what they keep of earlier tasks: texts, heads, and weights if there are any yet."""
    settings = dict(pair.split("=") for pair in SETTINGS)
    config = RunConfig(
        str(place / "four.yaml"), method, str(place / "model"), test_limit=8, settings=settings
    )

    def stop(task: Task, runs: Sequence[StreamRun]) -> None:
        if task.name == STREAM[1]:
            raise KeyboardInterrupt

    stopped = place / f"stopped-{method}"
    with pytest.raises(KeyboardInterrupt):
        run(config, [0], stopped, device="cpu", after_task=stop)
    (again,) = run(config, [0], stopped, device="cpu")
    (whole,) = run(config, [0], place / f"unstopped-{method}", device="cpu")
    assert again["matrix"] == whole["matrix"]
    events = next(stopped.rglob("events.jsonl")).read_text().splitlines()
    tasks = [event["task"] for event in map(json.loads, events) if event["event"] == "task"]
    assert tasks == list(STREAM)  # none of them twice


def test_a_model_per_task_is_read_when_its_task_is_asked(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be gigabytes: keys, scores and the record at the end do without."""
    settings = dict(pair.split("=") for pair in SETTINGS)
    stream, model = str(place / "four.yaml"), str(place / "model")
    config = RunConfig(
        stream, "per-task-finetune", model, test_limit=8, inner_rows=0, settings=settings
    )
    seen, read = [], records.read_tensors
    monkeypatch.setattr(records, "read_tensors", lambda path: seen.append(path) or read(path))
    (result,) = run(config, [0], tmp_path, device="cpu")
    (folder,) = (file.parent for file in tmp_path.rglob("result.json"))
    weights = [folder / "weights" / f"{name}.safetensors" for name in STREAM]
    # once each; the last is still at hand
    assert [path for path in seen if path.parent.name == "weights"] == weights[:-1]
    assert all(task["unchanged"] for task in result["tasks"].values())
    kept = records.DiskSnapshots(folder / "tasks", STREAM)[STREAM[0]].weights
    seen.clear()
    assert len(kept) == len(read(weights[0])[0])
    assert not seen  # its size is known without it
    assert set(kept) == set(read(weights[0])[0])


def test_a_second_process_is_told_and_stops(place: Path) -> None:
    first = start(place, "twice")
    while not list((place / "twice").glob("*/*/*/.lock")) and first.poll() is None:
        time.sleep(0.01)
    second = start(place, "twice")
    assert second.wait(timeout=120) in (0, 2)
    if second.returncode == 2:
        assert b"another process is running" in second.stderr.read()
    assert first.wait(timeout=300) == 0
    assert contents(place / "twice") == contents(place / "whole")


def damaged(place: Path, name: str) -> Path:
    """A copy of the whole run that has still to write its results."""
    root = place / name
    shutil.copytree(place / "whole", root)
    for result in root.glob("*/*/*/result.json"):
        result.unlink()
    return root


def test_a_damaged_state_is_named(place: Path) -> None:
    root = damaged(place, "broken")
    state = next(root.glob("*/*/0-*/state/*.safetensors"))
    state.write_bytes(state.read_bytes()[:-3] + b"\0\0\0")
    process = start(place, "broken")
    assert process.wait(timeout=120) == 2
    error = process.stderr.read().decode()
    assert "is damaged or missing" in error
    assert "its pack begins anew" in error
    assert len(error.strip().splitlines()) == 1


def test_a_changed_config_is_named(place: Path) -> None:
    root = damaged(place, "changed")
    config = next(root.glob("*/*/0-*/config.yaml"))
    config.write_text(config.read_text().replace("epochs: '3'", "epochs: '4'"))
    process = start(place, "changed")
    assert process.wait(timeout=120) == 2
    assert b"config.yaml was changed since the run began" in process.stderr.read()


def test_a_full_disk_is_named_and_what_was_finished_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import errno

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records, "write_atomic", full)
    with pytest.raises(
        RecordError, match=r"No space left on device. What was finished is kept.*same command"
    ):
        records.write_json(tmp_path / "x.json", {})
    assert contents(place / "whole")


def test_a_folder_that_cannot_be_written_is_named(place: Path) -> None:
    (place / "a-file").write_text("")
    process = start(place, "a-file/runs")
    assert process.wait(timeout=120) == 2
    assert b"cannot write to a-file/runs" in process.stderr.read()


def test_what_cannot_begin_is_no_unfinished_run(tmp_path: Path) -> None:
    with pytest.raises(QTuningError, match="no-such-folder"):
        run(RunConfig("order-04"), [0], root=tmp_path, data=str(tmp_path / "no-such-folder"))
    with pytest.raises(QTuningError, match="Did you mean 'shared'"):
        run(RunConfig("starter-four", evaluate_with="shard"), [0], root=tmp_path)
    for method, mode in (("prompt-tuning", "shared"), ("ewc", "shared"), ("ewc", "current")):
        config = RunConfig("starter-four", method, evaluate_with=mode)
        with pytest.raises(QTuningError, match=f"evaluation mode '{mode}' needs a method with"):
            run(config, [0], root=tmp_path)
    methods = ("q-tuning", "per-task-prompt")
    configs = [RunConfig("starter-four", method, evaluate_with="shared") for method in methods]
    with pytest.raises(QTuningError, match="evaluation mode 'shared' needs a method with"):
        run_together([(config, 0) for config in configs], tmp_path)
    (tmp_path / "own.csv").write_text("text,label,split\na,x,train\nb,y,test\n")
    (tmp_path / "own.yaml").write_text(
        "name: own\nversion: 1\ndescription: a class without training rows\n"
        f"tasks: [{tmp_path / 'own.csv'}]\n"
    )
    with pytest.raises(QTuningError, match="train"):
        run(RunConfig(str(tmp_path / "own.yaml")), [0], root=tmp_path)
    assert not list(tmp_path.rglob("config.yaml"))
    with pytest.raises(RecordError, match="no records"):
        gather([tmp_path])
