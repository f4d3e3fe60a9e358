"""Orders of a stream in one pack: each run ends as it would alone, and goes on after a stop with the same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from qtuning import keys, stream_loop
from qtuning.cli_sweep import _print_outcomes, _print_packs
from qtuning.errors import ConfigError
from qtuning.records import read_tensors
from qtuning.runs import RunConfig, run, run_together
from qtuning.sweep import Place, Sweep, expand, read_sweep, run_here
from tests.conftest import make_model, make_tokenizer
from tests.unit.test_resume import contents

TINY = {
    "prompt_length": 2,
    "shared_length": 2,
    "queue_size": 2,
    "epochs": 2,
    "shots": 4,
    "validation_limit": 4,
}
ORDERS = {"a": ["spam", "urgency", "tone"], "b": ["tone", "spam", "urgency"], "c": ["tone", "spam"]}  # fmt: skip


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, RunConfig]:
    """A tiny model and three orders, two of them as long as each other."""
    monkeypatch.chdir(tmp_path)
    make_model("bert").save_pretrained("model")
    make_tokenizer("bert").save_pretrained("model")
    for name, tasks in ORDERS.items():
        stream = {"name": name, "version": 1, "description": name, "tasks": tasks}
        Path(f"{name}.yaml").write_text(yaml.safe_dump(stream))
    return {
        name: RunConfig(stream=f"{name}.yaml", model="model", test_limit=4, settings=TINY)
        for name in ORDERS
    }


def together(configs: dict[str, RunConfig], root: str, **options: Any) -> list[dict[str, Any]]:
    return run_together(
        with_seeds([configs["a"], configs["b"]], 0, 1), Path(root), device="cpu", **options
    )


def with_seeds(configs: Sequence[RunConfig], *seeds: int) -> list[tuple[RunConfig, int]]:
    return [(config, seed) for config in configs for seed in seeds]


def test_every_run_ends_as_it_would_alone(configs: dict[str, RunConfig]) -> None:
    packed = together(configs, "packed")
    assert [(r["stream"], r["seed"]) for r in packed] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    alone = [
        result for name in "ab" for result in run(configs[name], [0, 1], Path("alone"), device="cpu")
    ]  # fmt: skip
    for one, other in zip(packed, alone, strict=True):
        assert list(one["tasks"]) == ORDERS[one["stream"]]
        assert one["config"] == other["config"]
        for name in one["tasks"]:
            assert one["tasks"][name]["fingerprint"] == other["tasks"][name]["fingerprint"]
    for file in sorted(Path("alone").rglob("tasks/*.safetensors")):
        rows = [
            read_tensors(Path(root, *file.parts[1:]))[0]["rows"] for root in ("packed", "alone")
        ]
        np.testing.assert_allclose(*rows, atol=1e-4)
    first, second = (json.dumps(r["matrix"]) for r in (packed[0], packed[2]))
    assert first != second


MIXED = [
    ("a", "q-tuning", {"prompt_lr": 0.003}),
    ("b", "q-tuning", {"prompt_lr": 0.03, "epochs": 3}),
    ("b", "prog-prompt", {}),
    ("a", "per-task-prompt-long", {"average": 0.5, "batch_size": 8}),
    ("a", "prompt-tuning", {"clip": 0.1}),
]


def mixed(configs: dict[str, RunConfig]) -> list[RunConfig]:
    return [
        replace(configs[order], method=method, settings={**TINY, **own})
        for order, method, own in MIXED
    ]


def test_methods_and_settings_share_a_pack_and_end_as_alone(configs: dict[str, RunConfig]) -> None:
    """Other learning rates, epochs, averages, clipping and batches in the same passes."""
    packed = run_together(with_seeds(mixed(configs), 0, 1), Path("packed"), device="cpu")
    assert [(r["method"], r["seed"]) for r in packed] == [
        (m, s) for _, m, _ in MIXED for s in (0, 1)
    ]
    for config in mixed(configs):
        run(config, [0, 1], Path("alone"), device="cpu")
    files = sorted(Path("alone").rglob("tasks/*.safetensors"))
    assert len(files) == len(MIXED) * 2 * 3
    for file in files:
        own = [read_tensors(Path(root, *file.parts[1:]))[0]["rows"] for root in ("packed", "alone")]
        np.testing.assert_allclose(*own, atol=1e-4)
    learnt = {json.dumps(result["matrix"]) for result in packed}
    assert len(learnt) > len(MIXED)


def test_lanes_of_a_mixed_pack_can_be_told_apart(configs: dict[str, RunConfig]) -> None:
    names: set[str] = set()
    run_together(
        with_seeds(mixed(configs)[:2], 0),
        Path("named"),
        device="cpu",
        report=lambda now: names.add(now.lane),
    )
    first, second = (config.resolved().short_hash() for config in mixed(configs)[:2])
    assert f"spam, seed 0, q-tuning {first}" in names
    assert f"spam, seed 0, q-tuning {second}" in names
    names.clear()
    together(configs, "orders", report=lambda now: names.add(now.lane))
    for order in "ab":  # the same tasks in both
        assert f"spam, seed 1, q-tuning {configs[order].resolved().short_hash()}" in names
    names.clear()
    run(configs["a"], [0, 1], Path("seeds"), device="cpu", report=lambda now: names.add(now.lane))
    assert {"spam, seed 0", "spam, seed 1"} <= names


def test_texts_that_runs_share_are_read_once(
    configs: dict[str, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    real = keys.read_features
    monkeypatch.setattr(
        keys, "read_features", lambda b, texts: counted.append(len(texts)) or real(b, texts)
    )
    run_together(with_seeds([configs["a"]], 0), Path("alone"), device="cpu")
    alone = counted.copy()
    counted.clear()
    run_together(with_seeds([configs["a"], mixed(configs)[3]], 0), Path("shared"), device="cpu")
    assert (
        counted == alone[-len(counted) :]
    )  # two runs with the same texts; the reference was read before
    assert len(counted) >= 3


def test_a_mixed_pack_goes_on_with_the_same_bytes(configs: dict[str, RunConfig]) -> None:
    run_together(with_seeds(mixed(configs), 0), Path("whole"), device="cpu")
    epochs: list[int] = []

    def stop(now: Any) -> None:
        epochs.append(now.epoch)
        if len(epochs) == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_together(with_seeds(mixed(configs), 0), Path("stopped"), device="cpu", report=stop)
    assert list(Path("stopped").rglob("state/*.safetensors"))
    run_together(with_seeds(mixed(configs), 0), Path("stopped"), device="cpu")
    whole, stopped = (
        {
            file.relative_to(root): file.read_bytes()
            for file in Path(root).rglob("tasks/*.safetensors")
        }
        for root in ("whole", "stopped")
    )
    assert whole == stopped
    for file in Path("stopped").rglob("events.jsonl"):
        events = [json.loads(line) for line in file.read_text().splitlines()]
        seen = [(e["task"], e["epoch"]) for e in events if e["event"] == "epoch"]
        assert len(seen) == len(set(seen))


def test_a_run_that_began_again_in_other_company_is_not_taken_for_the_first(
    configs: dict[str, RunConfig],
) -> None:
    """Both packs stand at the same number of commits, in different tasks."""
    one = replace(configs["a"], settings={**TINY, "epochs": 1, "queue_size": 4})
    other = replace(one, settings={**one.settings, "epochs": 3})

    def stop_after(tasks: int) -> Any:
        def stop(task: Any, runs: Any) -> None:
            if runs[0].done == tasks:
                raise KeyboardInterrupt

        return stop

    for company, tasks, said in (
        ([other, one], 1, nullcontext()),
        ([one], 2, pytest.warns(UserWarning, match="1 of the 1 runs .* begun in other company")),
    ):
        with said, pytest.raises(KeyboardInterrupt):
            run_together(
                with_seeds(company, 0), Path("q"), device="cpu", after_task=stop_after(tasks)
            )
    with pytest.warns(UserWarning, match="begun again in other company"):
        found = run_together(with_seeds([other, one], 0), Path("q"), device="cpu")
    clean = run_together(with_seeds([other, one], 0), Path("clean"), device="cpu")
    for result, expected in zip(found, clean, strict=True):
        rows = [[task["prompt_rows"] for task in r["tasks"].values()] for r in (result, expected)]
        assert rows == [[4, 6, 8], [4, 6, 8]]
        assert len(result["costs"]) == 3
        assert result["matrix"] == expected["matrix"]


def test_a_pack_that_was_stopped_goes_on_with_the_same_bytes(configs: dict[str, RunConfig]) -> None:
    together(configs, "whole")
    learnt: list[str] = []

    def stop(task: Any, runs: Any) -> None:
        learnt.append(task.name)
        if len(learnt) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        together(configs, "stopped", after_task=stop)
    assert not list(Path("stopped").rglob("result.json"))
    again: list[str] = []
    together(configs, "stopped", after_task=lambda task, runs: again.append(task.name))
    assert again == [
        "tone",
        "urgency",
    ]  # the third of each order: the first two are not learnt again
    assert contents(Path("stopped")) == contents(Path("whole"))


def test_a_result_that_is_missing_is_taken_from_the_packs_last_commit(
    configs: dict[str, RunConfig],
) -> None:
    together(configs, "whole")
    shutil.copytree("whole", "killed")
    gone = sorted(Path("killed/b").rglob("result.json"))[1]
    gone.unlink()
    learnt: list[str] = []
    together(configs, "killed", after_task=lambda task, runs: learnt.append(task.name))
    assert learnt == []
    assert contents(Path("killed")) == contents(Path("whole"))


def test_what_cannot_share_a_pack_is_refused(configs: dict[str, RunConfig]) -> None:
    other_rows = RunConfig(stream="b.yaml", model="model", settings=TINY)
    moves_weights = replace(configs["b"], method="ewc")
    for other in (configs["c"], other_rows, moves_weights):
        with pytest.raises(
            ConfigError, match="differ in stream, method, preset and settings alone"
        ):
            run_together(with_seeds([configs["a"], other], 0), Path("refused"))


def test_a_sweep_joins_streams_of_equal_length(configs: dict[str, RunConfig]) -> None:
    raw = {
        "streams": ["a.yaml", "b.yaml", "c.yaml"],
        "methods": ["per-task-prompt", "q-tuning"],
        "models": ["model"],
        "settings": TINY,
        "test_limit": 4,
    }
    apart = expand(read_sweep(raw, "x.yaml"))
    joined = expand(read_sweep({**raw, "together": True}, "x.yaml"))
    assert len(apart) == 6
    assert [[(c.method, c.stream) for c, _ in pack.runs] for pack in joined] == [
        [("per-task-prompt", "a.yaml"), ("q-tuning", "a.yaml"),
         ("per-task-prompt", "b.yaml"), ("q-tuning", "b.yaml")],
        [("per-task-prompt", "c.yaml"), ("q-tuning", "c.yaml")],
    ]  # fmt: skip
    assert joined[0].name == "per-task-prompt · a · model · and 3 more"
    found = run_here(joined[1:], Place(Path("here"), device="cpu"))
    assert not found[0].error
    assert len(found[0].scores) == 2
    assert len(list(Path("here").rglob("result.json"))) == 2
    weights = expand(read_sweep({**raw, "methods": ["ewc", "replay"], "together": True}, "x.yaml"))
    assert [len(pack.runs) for pack in weights] == [2, 2, 1, 1]  # orders share, methods do not
    orders = expand(read_sweep({**raw, "together": "streams"}, "x.yaml"))
    assert [{(c.method, c.stream[0]) for c, _ in pack.runs} for pack in orders] == [
        {("per-task-prompt", "a"), ("per-task-prompt", "b")}, {("q-tuning", "a"), ("q-tuning", "b")},
        {("per-task-prompt", "c")}, {("q-tuning", "c")},
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="together must be true, false or streams"):
        read_sweep({**raw, "together": "yes"}, "x.yaml")


def test_members_of_a_pack_may_have_seeds_of_their_own(
    configs: dict[str, RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """As where some methods have six seeds and others three: one pack, and each run as alone."""
    raw = {
        "streams": ["c.yaml"],
        "models": ["model"],
        "settings": TINY,
        "test_limit": 4,
        "together": True,
        "parts": [
            {"methods": ["q-tuning"], "seeds": [0, 1, 2]},
            {"methods": ["per-task-prompt"], "seeds": [1]},
        ],
    }
    (pack,) = expand(read_sweep(raw, "x.yaml"))
    assert [(config.method, seed) for config, seed in pack.runs] == [
        ("q-tuning", 0), ("q-tuning", 1), ("q-tuning", 2), ("per-task-prompt", 1),
    ]  # fmt: skip
    (found,) = run_here([pack], Place(Path("here"), device="cpu"))
    alone = [
        run(c, [seed], Path("alone"), device="cpu")[0]["average_score"] for c, seed in pack.runs
    ]
    assert list(found.scores) == alone
    _print_packs([pack], Path("here"))
    _print_outcomes([found], Path("here"))
    said = capsys.readouterr().out.splitlines()
    queue, single = f"{sum(alone[:3]) / 3:.1%}", f"{alone[3]:.1%}"
    assert any(line.startswith("│ q-tuning") and "3 of 3" in line for line in said)
    assert any(line.startswith("│ per-task-prompt") and "1 of 1" in line for line in said)
    assert any(line.startswith("│ q-tuning") and queue in line for line in said)
    assert any(line.startswith("│ per-task-prompt") and single in line for line in said)


def test_cells_are_asked_in_as_many_goes_as_memory_wants(
    configs: dict[str, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All runs at once, or one after another: the same scores, and the same bytes at the end as when learnt."""
    sizes: list[list[int]] = []
    real = stream_loop.predict_together

    def counted(backbone: Any, asked: Any) -> Any:
        sizes.append([len(texts) for _, texts in asked])
        return real(backbone, asked)

    monkeypatch.setattr(stream_loop, "predict_together", counted)
    whole = together(configs, "whole")
    assert max(map(len, sizes)) == 4  # all runs
    assert max(map(sum, sizes)) > 20
    sizes.clear()
    monkeypatch.setattr(stream_loop, "ROWS_AT_ONCE", 20)
    cut = together(configs, "cut")
    assert all(len(asked) == 1 or sum(asked) <= 20 for asked in sizes)
    assert [result["matrix"] for result in cut] == [result["matrix"] for result in whole]
    assert all(task["unchanged"] for result in cut for task in result["tasks"].values())


def test_what_is_wrong_with_one_does_not_stop_the_others(configs: dict[str, RunConfig]) -> None:
    raw = {
        "streams": ["c.yaml"],
        "models": ["model"],
        "settings": TINY,
        "vary": {"warm_start": ["none", "loss"]},
        "test_limit": 4,
        "together": True,
    }
    (pack,) = expand(read_sweep(raw, "x.yaml"))
    (found,) = run_here([pack], Place(Path("here"), device="cpu"))
    assert found.error.startswith("q-tuning · c · model · warm_start loss: ")
    assert "use warm_start 'key'" in found.error
    (record,) = Path("here").rglob("result.json")
    assert json.loads(record.read_text())["settings"]["warm_start"] == "none"


def test_apart_is_the_default() -> None:
    assert not Sweep(["demo"]).together
