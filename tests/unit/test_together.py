"""Orders of a stream in one pack: each run ends as it would alone, and goes on after a stop with the same bytes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

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
    return run_together([configs["a"], configs["b"]], [0, 1], Path(root), device="cpu", **options)


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
    packed = run_together(mixed(configs), [0, 1], Path("packed"), device="cpu")
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
            run_together([configs["a"], other], [0], Path("refused"))


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
    assert [[(c.method, c.stream) for c in pack.configs] for pack in joined] == [
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
    assert [len(pack.configs) for pack in weights] == [2, 2, 1, 1]  # orders share, methods do not
    orders = expand(read_sweep({**raw, "together": "streams"}, "x.yaml"))
    assert [{(c.method, c.stream[0]) for c in pack.configs} for pack in orders] == [
        {("per-task-prompt", "a"), ("per-task-prompt", "b")}, {("q-tuning", "a"), ("q-tuning", "b")},
        {("per-task-prompt", "c")}, {("q-tuning", "c")},
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="together must be true, false or streams"):
        read_sweep({**raw, "together": "yes"}, "x.yaml")


def test_apart_is_the_default() -> None:
    assert not Sweep(["demo"]).together
