"""A grid of runs: what it expands to, what is reported, the same bytes here and on Ray."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from qtuning import runs
from qtuning.cli import main
from qtuning.errors import ConfigError, TrainingError
from qtuning.runs import run_folder
from qtuning.sweep import (
    Place,
    Sweep,
    expand,
    joined,
    override,
    read_sweep,
    run_here,
    run_on_ray,
    run_pack,
)
from tests.conftest import make_model, make_tokenizer
from tests.unit.test_resume import contents

TINY = {"prompt_length": 2, "shared_length": 2, "queue_size": 2, "epochs": 2, "shots": 4}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A folder with a tiny model and a stream of two tasks; records go to `here`."""
    monkeypatch.chdir(tmp_path)
    make_model("bert").save_pretrained("model")
    make_tokenizer("bert").save_pretrained("model")
    stream = {"name": "two", "version": 1, "description": "two", "tasks": ["spam", "urgency"]}
    Path("two.yaml").write_text(yaml.safe_dump(stream))
    return Place(Path("here"), device="cpu", threads=1)


def tiny(**changes: Any) -> Sweep:
    fixed = {"test_limit": 4}
    return Sweep(
        **{"streams": ["two.yaml"], "models": ["model"], "seeds": [0, 1], "settings": TINY, "fixed": fixed}
        | changes
    )  # fmt: skip


# ── what a sweep is ──────────────────────────────────────────────────────────────────────────


def test_every_combination_is_a_pack_with_all_seeds() -> None:
    packs = expand(
        Sweep(
            ["demo", "order-09"],
            ["q-tuning", "ewc"],
            ["minilm", "./folder"],
            seeds=[0, 1, 2],
            settings={"epochs": 3},
            vary={"queue_size": [5, 10], "prompt_lr": [0.1, 0.2]},
            fixed={"test_limit": 7},
        )
    )
    assert len(packs) == 2 * 2 * 2 * 2 * 2
    assert {pack.seeds for pack in packs} == {(0, 1, 2)}
    first = packs[0].config
    assert first.settings == {"epochs": 3, "queue_size": 5, "prompt_lr": 0.1}
    assert (first.stream, first.model, first.method) == ("demo", "minilm", "q-tuning")
    assert {pack.config.test_limit for pack in packs} == {7}
    assert packs[-1].name == "ewc · order-09 · folder · queue_size 10 · prompt_lr 0.2"
    assert len({run_folder(Path(), pack.config, 0) for pack in packs}) == len(packs)


def test_a_preset_can_be_each_methods_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for method, rate in (("q-tuning", 0.1), ("ewc", 0.2)):
        Path(f"{method}-minilm.yaml").write_text(f"settings: {{prompt_lr: {rate}, epochs: 9}}\n")
    packs = expand(
        Sweep(
            ["demo"],
            ["q-tuning", "ewc"],
            presets=["{method}-{model}.yaml"],
            vary={"epochs": [1, 2]},
        )
    )
    found = [(pack.config.settings["prompt_lr"], pack.config.settings["epochs"]) for pack in packs]
    assert found == [(0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2)]


def test_single_values_stand_for_lists_and_the_example_is_fine() -> None:
    found = read_sweep({"streams": "demo", "seeds": 3, "vary": {"epochs": 2}}, "x.yaml")
    assert expand(found)[0].config.settings == {"epochs": 2}
    assert found.seeds == (3,)
    example = Path(__file__).parents[2] / "examples" / "sweep.yaml"
    assert len(expand(read_sweep(yaml.safe_load(example.read_text()), "sweep.yaml"))) > 1


PARTS = {
    "streams": ["order-01"],
    "methods": ["q-tuning"],
    "settings": {"shots": 20, "epochs": 3},
    "parts": [
        {"settings": {"scale": False}},
        {"settings": {"shots": 200, "scale": True}, "vary": {"queue_size": [5, 10]}},
        {"streams": ["order-08", "order-09"], "methods": ["ewc"], "test_limit": 7},
        {"settings": {"scale": False}},
    ],
}


def packs_of(raw: dict[str, Any], **own: Any) -> list[Any]:
    return expand(read_sweep(override(raw, own), "x.yaml"))


def test_parts_are_grids_laid_over_what_is_common() -> None:
    packs = packs_of(PARTS)
    assert [pack.name for pack in packs] == [
        "q-tuning · order-01 · minilm · scale False",
        "q-tuning · order-01 · minilm · queue_size 5 · shots 200 · scale True",
        "q-tuning · order-01 · minilm · queue_size 10 · shots 200 · scale True",
        "ewc · order-08 · minilm",
        "ewc · order-09 · minilm",
    ]
    assert packs[0].config.settings == {"shots": 20, "epochs": 3, "scale": False}
    assert packs[1].config.settings["shots"] == 200
    assert [pack.config.test_limit for pack in packs] == [250, 250, 250, 7, 7]


def test_flags_override_parts_and_choose_from_what_they_list() -> None:
    packs = packs_of(PARTS, settings={"shots": 2, "scale": True}, test_limit=5, seeds=[4])
    assert {pack.config.settings["shots"] for pack in packs} == {2}
    assert {pack.config.settings["scale"] for pack in packs} == {True}
    assert {(pack.config.test_limit, pack.seeds) for pack in packs} == {(5, (4,))}
    chosen = packs_of(PARTS, streams=["order-09"])
    assert [pack.config.method for pack in chosen] == ["q-tuning"] * 3 + ["ewc"]
    assert {pack.config.stream for pack in chosen} == {"order-09"}
    assert [pack.config.method for pack in packs_of(PARTS, streams=["order-02"])] == [
        "q-tuning"
    ] * 3
    only = {**PARTS, "parts": PARTS["parts"][2:3]}
    with pytest.raises(ConfigError, match="no part of the sweep has all of: order-02"):
        packs_of(only, streams=["order-02"])


REFUSED = {
    "parts-that-are-no-list": ({"parts": {"streams": ["demo"]}}, "parts must be a list"),
    "no-parts": ({"streams": ["demo"], "parts": []}, "parts must be a list"),
    "part-without-streams": ({"parts": [{"methods": ["ewc"]}]}, "x.yaml, part 1: streams"),
    "key-of-a-part": (
        {"streams": ["demo"], "parts": [{}, {"setting": {}}]},
        "part 2: Unknown key 'setting'. Did you mean 'settings'?",
    ),
    "unknown-key": ({"streams": ["demo"], "method": ["ewc"]}, "'method'. Did you mean 'methods'?"),
    "no-streams": ({"methods": ["ewc"]}, "streams are missing"),
    "empty-list": ({"streams": ["demo"], "methods": []}, "methods is an empty list"),
    "twice": ({"streams": ["demo"], "seeds": [1, 1]}, "seeds lists 1 twice"),
    "seed-that-is-a-word": ({"streams": ["demo"], "seeds": ["a"]}, "whole numbers, got 'a'"),
    "name-that-is-a-number": ({"streams": [5]}, "names, got 5"),
    "settings-list": ({"streams": ["demo"], "settings": ["a"]}, "must be a mapping"),
    "set-and-varied": (
        {"streams": ["demo"], "settings": {"epochs": 1}, "vary": {"epochs": [1, 2]}},
        "both set and varied",
    ),
    "unknown-setting": (
        {"streams": ["demo"], "vary": {"queue_sise": [1]}},
        "Did you mean 'queue_size'?",
    ),
    "unknown-method": ({"streams": ["demo"], "methods": ["ewcc"]}, "Did you mean 'ewc'?"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_a_bad_sweep_is_refused(case: Any) -> None:
    raw, says = case
    with pytest.raises(ConfigError) as error:
        expand(read_sweep(raw, "x.yaml"))
    assert says in str(error.value)


def test_parts_that_mean_the_same_runs_share_a_pack_with_all_seeds() -> None:
    raw = {
        "streams": ["demo"],
        "seeds": [0, 1, 2],
        "parts": [
            {"methods": ["q-tuning", "prog-prompt"]},
            {"methods": ["q-tuning"], "seeds": [2, 3, 4, 5]},
        ],
    }
    packs = expand(read_sweep(raw, "x.yaml"))
    assert {pack.config.method: pack.seeds for pack in packs} == {
        "q-tuning": (0, 1, 2, 3, 4, 5),
        "prog-prompt": (0, 1, 2),
    }


def test_a_flag_may_vary_what_a_file_sets_and_set_what_it_varies() -> None:
    raw = {"streams": ["demo"], "settings": {"shots": 20}, "vary": {"queue_size": [5, 10]}}
    own = {"settings": {"queue_size": "3"}, "vary": {"shots": ["4", "8"]}}
    found = read_sweep(override(raw, own), "x.yaml")
    assert dict(found.settings) == {"queue_size": "3"}
    assert found.vary == {"shots": ("4", "8")}
    bad = {"streams": ["demo"], "parts": [{"settings": "x"}]}
    with pytest.raises(ConfigError, match="settings must be a mapping"):
        read_sweep(override(bad, {"settings": {}, "vary": {}}), "x.yaml")


# ── in this process ──────────────────────────────────────────────────────────────────────────


def test_a_finished_sweep_answers_at_once(place: Place) -> None:
    packs = expand(tiny(methods=["per-task-prompt", "linear-probe"]))
    first = run_here(packs, place)
    assert [each.error for each in first] == ["", ""]
    assert all(len(each.scores) == 2 for each in first)
    assert len(list(place.root.rglob("result.json"))) == 4
    before = {path: path.stat().st_mtime_ns for path in place.root.rglob("*") if path.is_file()}
    again = run_here(packs, place)
    assert [each.scores for each in again] == [each.scores for each in first]
    after = {path: path.stat().st_mtime_ns for path in place.root.rglob("*") if path.is_file()}
    assert after == before


def test_a_pack_that_fails_leaves_the_others_finished(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qtuning import sweep

    real = sweep.run_together

    def fails(runs: Any, *args: Any, **options: Any) -> Any:
        config = runs[0][0]
        if config.settings["prompt_length"] == 3:
            raise TrainingError("the loss\nis nan; lower prompt_lr.")
        if config.settings["prompt_length"] == 4:
            raise ZeroDivisionError("by zero")
        return real(runs, *args, **options)

    monkeypatch.setattr(sweep, "run_together", fails)
    plain = {key: value for key, value in TINY.items() if key != "prompt_length"}
    seen: list[str] = []
    found = run_here(
        expand(tiny(settings=plain, seeds=[0], vary={"prompt_length": [3, 4, 2]})),
        place,
        lambda outcome: seen.append(outcome.pack.name),
    )
    errors = ["the loss is nan; lower prompt_lr.", "ZeroDivisionError: by zero", ""]
    assert [each.error for each in found] == errors
    assert len(seen) == 3
    assert found[2].scores


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["qtuning", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().out

    return call


FLAGS = ("--stream", "two.yaml", "--model", "./model", "--seeds", "0 1", "--device", "cpu")
SET = tuple(word for pair in TINY.items() for word in ("--set", "{}={}".format(*pair)))


def test_the_command(place: Place, command: Any) -> None:
    grid = (*FLAGS, *SET, "--test-limit", "4", "--method", "per-task-prompt linear-probe")
    code, said = command("sweep", *grid, "--dry-run")
    assert code == 0
    assert "2 packs, 4 runs, 0 of them finished" in said
    assert not Path("runs").exists()
    code, said = command("sweep", *grid, "--cpus-per-pack", 1)
    assert code == 0
    assert "2 packs finished, 0 failed" in said
    assert "qtuning report runs -o report.html" in said
    assert "4 of them finished" in command("sweep", *grid, "--dry-run")[1]
    run = (*FLAGS, *SET, "--test-limit", "4", "--method", "linear-probe")
    assert command("run", *run)[0] == 0  # the sweep's records are those of the same run
    assert len(list(Path("runs").rglob("result.json"))) == 4
    assert command("report", "runs", "-o", "report.html")[0] == 0


def test_the_command_tells_how_far_it_is(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a log: a line for every pack, and between them those of learning."""
    monkeypatch.setattr("qtuning.progress.SECONDS_BETWEEN_LINES", 0.0)
    words = ("sweep", *FLAGS, *SET, "--test-limit", "4", "--method", "per-task-prompt linear-probe")
    monkeypatch.setattr(sys, "argv", ["qtuning", *words])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err.splitlines()
    first, second = (i for i, line in enumerate(said) if line.startswith("✓ pack"))
    assert said[first] == "✓ pack 1 of 2: per-task-prompt · two · model"
    assert said[second] == "✓ pack 2 of 2: linear-probe · two · model"
    learning = said[:first]
    assert learning[0].startswith("[1/4] ")  # two tasks, two seeds
    assert learning[-1].startswith("[4/4] ")
    assert all("epoch" in line for line in learning)
    (run,) = Path("runs/two/per-task-prompt").glob("1-*")
    shutil.rmtree(run)
    with pytest.raises(SystemExit):
        main()
    again = [line for line in capsys.readouterr().err.splitlines() if "epoch" in line]
    assert again[0].startswith("[1/2] ")  # seed 0 is finished
    assert again[-1].startswith("[2/2] ")


def test_runs_that_differ_in_stream_alone_are_counted_apart(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qtuning.progress.SECONDS_BETWEEN_LINES", 0.0)
    Path("other.yaml").write_text(Path("two.yaml").read_text().replace("name: two", "name: other"))
    words = ("sweep", *FLAGS, *SET, "--test-limit", "4", "--stream", "two.yaml other.yaml", "--together")  # fmt: skip
    for method in ("per-task-prompt", "continual-finetune"):
        monkeypatch.setattr(sys, "argv", ["qtuning", *words, "--method", method])
        with pytest.raises(SystemExit):
            main()
        *learning, _ = (line for line in capsys.readouterr().err.splitlines() if "epoch" in line)
        assert learning[-1].startswith("[8/8] "), method  # two streams of two tasks, two seeds


def test_the_command_tells_of_a_failed_pack(place: Place, command: Any) -> None:
    code, said = command(
        "sweep", *FLAGS, *SET, "--test-limit", "4", "--model", "model ./a/b/absent"
    )
    assert code == 1
    assert "failed: q-tuning · two · absent" in said
    assert "1 pack finished, 1 failed" in said


def test_the_command_takes_a_file_and_flags_override_it(place: Place, command: Any) -> None:
    sweep = {"streams": ["two.yaml"], "methods": ["ewc"], "vary": {"queue_size": [2, 3]}}
    Path("s.yaml").write_text(yaml.safe_dump(sweep))
    code, said = command("validate", "s.yaml")
    assert code == 0
    assert "sweep of 2 packs, 2 runs" in said
    _, said = command("sweep", "s.yaml", "--vary", "epochs=1,2", "--seeds", "4 5", "--dry-run")
    assert "4 packs, 8 runs" in said


# ── on Ray ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Ray of two cores, for all tests of this file."""
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.ray
def test_the_same_bytes_on_ray(place: Place, cluster: Any) -> None:
    packs = expand(tiny(methods=["q-tuning", "per-task-prompt", "continual-finetune"]))
    run_here(packs, place)
    there = Place(Path("there"), device="cpu")
    seen: list[str] = []
    found = run_on_ray(packs, there, lambda outcome: seen.append(outcome.error), cpus=1)
    assert seen == ["", "", ""]
    assert [each.pack.name for each in found] == [pack.name for pack in packs]
    assert contents(there.root) == contents(place.root)


@pytest.mark.ray
def test_a_killed_worker_ends_with_the_same_records(place: Place, cluster: Any) -> None:
    packs = expand(tiny(settings={**TINY, "epochs": 30}))
    run_here(packs, place)
    there = Place(Path("there"), device="cpu")
    killed: list[dict[Path, int]] = []
    killer = threading.Thread(target=kill_in_the_middle, args=(there.root, killed))
    killer.start()
    found = run_on_ray(packs, there, cpus=1, retries=1)
    killer.join()
    assert [each.error for each in found] == [""]
    assert (
        len(killed[0]) == 2
    )  # the first task of both seeds was finished, and was not learnt again
    assert {path: path.stat().st_mtime_ns for path in killed[0]} == killed[0]
    assert contents(there.root) == contents(place.root)


def kill_in_the_middle(root: Path, killed: list[dict[Path, int]]) -> None:
    """Kill whoever holds the lock of the run, once the first task is finished and the second has begun."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        events = [line for file in root.rglob("events.jsonl") for line in file.read_text().split()]
        if sum('"urgency"' in word for word in events) > 4:
            lock = next(root.rglob(".lock"))
            os.kill(holder(lock), signal.SIGKILL)
            done = root.rglob("tasks/*.safetensors")
            killed.append({path: path.stat().st_mtime_ns for path in done})
            return
        time.sleep(0.005)


def holder(file: Path) -> int:
    """The process that has a file open."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(link.resolve() == file.resolve() for link in folder.iterdir()):
                return int(folder.parent.name)
        except OSError:
            continue
    raise AssertionError(f"nobody holds {file}")


@pytest.mark.ray
def test_a_worker_that_always_dies_is_reported(place: Place, cluster: Any) -> None:
    packs = expand(tiny(methods=["per-task-prompt", "linear-probe"], seeds=[0]))
    stop = threading.Event()

    def kill_always() -> None:
        while not stop.is_set():
            for lock in Path("there").glob("*/per-task-prompt/*/.lock"):
                try:
                    os.kill(holder(lock), signal.SIGKILL)
                except AssertionError:
                    continue
            time.sleep(0.005)

    killer = threading.Thread(target=kill_always)
    killer.start()
    try:
        found = run_on_ray(packs, Place(Path("there"), device="cpu"), cpus=1, retries=1)
    finally:
        stop.set()
        killer.join()
    assert "its worker died 2 times" in found[0].error
    assert found[1].error == ""


@pytest.mark.ray
def test_errors_on_ray_are_those_of_the_pack(place: Place, cluster: Any) -> None:
    packs = expand(tiny(models=["./a/b/absent", "model"], methods=["linear-probe"], seeds=[0]))
    found = run_on_ray(packs, place, cpus=1)
    assert "cannot load the model './a/b/absent'" in found[0].error
    assert found[0].error == run_pack(packs[0], place).error
    assert found[1].error == ""
    with pytest.raises(ConfigError, match=r"--cpus-per-pack 64: no node has so many"):
        run_on_ray(packs, place, cpus=64)


def test_several_files_are_one_sweep(command, tmp_path) -> None:
    """What can share a pack does, and a run that stands in both is one."""
    common = {"streams": ["order-08"], "together": True, "seeds": [0, 1]}
    two = {"methods": ["q-tuning", "per-task-prompt"]}
    for name, own in (("a", {"seeds": [0]}), ("b", two), ("c", {"dtype": "bf16"})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**common, **own}))
    files = [str(tmp_path / f"{name}.yaml") for name in "abc"]
    raws = [yaml.safe_load(Path(file).read_text()) for file in files]
    packs = expand(joined([read_sweep(raw, "x.yaml") for raw in raws]))
    assert [len(pack.runs) for pack in packs] == [4, 2]  # bf16 shares nothing with the others
    code, said = command("sweep", *files, "--dry-run")
    assert (code, "2 packs, 6 runs" in said) == (0, True)
    assert command("sweep", files[0], tmp_path / "none.yaml", "--dry-run")[0] != 0


def test_packs_of_one_model_load_it_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """And end with the bytes of packs that load their own; a pack that fails leaves nothing behind."""
    loads: list[str] = []
    real = runs.load_backbone
    monkeypatch.setattr(
        runs, "load_backbone", lambda **about: loads.append(about["name"]) or real(**about)
    )
    methods = ["per-task-prompt", "q-tuning"]
    packs = expand(
        Sweep(["two.yaml"], methods, ["./model"], settings=TINY, fixed={"test_limit": 4})
    )
    run_here(packs, place)
    assert loads == ["./model"]
    apart = replace(place, root=Path("apart"))
    for pack in packs:
        run_pack(pack, apart)
    assert len(loads) == 3
    assert contents(place.root) == contents(apart.root)
    own, calls = runs.run_streams, []

    def failing_first(*given: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise TrainingError("the loss became nan.")
        return own(*given, **options)

    monkeypatch.setattr(runs, "run_streams", failing_first)
    outcomes = run_here(packs, replace(place, root=Path("again")))
    assert [bool(each.error) for each in outcomes] == [True, False]
    assert len(loads) == 5
