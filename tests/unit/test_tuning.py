"""Choosing hyper-parameters: the grid, the choice, the preset, the command."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from qtuning.cli import app
from qtuning.errors import ConfigError
from qtuning.presets import get_preset
from qtuning.runs import RunConfig
from qtuning.streams import get_stream
from qtuning.tuning import BUDGET, candidates, start_of, tune, write_preset
from tests.conftest import make_model, make_tokenizer

ROOT = Path(__file__).parent.parent.parent


def test_the_grid_starts_from_the_familys_defaults() -> None:
    found = candidates("q-tuning", "seq2seq", {"epochs": 3})
    assert [each["prompt_lr"] for each in found[::2]] == [0.09, 0.3, 0.9]
    assert all(each["prompt_lr"] == each["shared_lr"] for each in found)
    assert [each["epochs"] for each in found[:2]] == [3, 6]
    assert [each["replay_share"] for each in candidates("replay", "encoder", {})[:2]] == [
        0.01,
        0.25,
    ]
    assert candidates("q-tuning", "encoder", {"epochs": 1})[0]["epochs"] == 1
    assert candidates("linear-probe", "encoder", {}) == [{}]
    limited = candidates("q-tuning", "causal", {"epochs": 3, "most_steps": 160})
    assert [(each["epochs"], each["most_steps"]) for each in limited[:2]] == [(3, 160), (6, 320)]


def test_the_best_mean_wins_and_is_written_as_a_preset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def fake_run(config, seeds, root, **how):
        asked.append((config.stream, config.settings))
        rate, epochs = config.settings["prompt_lr"], config.settings["epochs"]
        bonus = {"demo": 0.0, "tuning": 0.1}[config.stream]
        return [{"average_score": rate * 10 + epochs / 1000 + bonus + s / 100} for s in seeds]

    monkeypatch.setattr("qtuning.tuning.run", fake_run)
    config = RunConfig("demo", settings={"shots": 4})
    tried = tune(config, ["tuning", "demo"], [0, 1], "encoder", tmp_path)
    assert len(tried) == 6
    assert len(asked) == 12
    assert all(settings["shots"] == 4 for _, settings in asked)
    assert tried[0].settings == {"prompt_lr": 0.03, "shared_lr": 0.03, "epochs": 30}
    assert tried[0].score == pytest.approx(0.3 + 0.03 + 0.05 + 0.005)
    assert [t.score for t in tried] == sorted((t.score for t in tried), reverse=True)
    write_preset(tmp_path / "mine.yaml", config, tried, "chosen here")
    assert get_preset(str(tmp_path / "mine.yaml")) == {"shots": 4, **tried[0].settings}
    assert len(yaml.safe_load((tmp_path / "mine.yaml").read_text())["tried"]) == 6
    ready = RunConfig("demo", preset=str(tmp_path / "mine.yaml")).resolved()
    assert ready.settings["prompt_lr"] == 0.03


def test_reported_streams_are_refused(tmp_path: Path) -> None:
    mine = {"name": "mine", "version": 1, "description": "", "tasks": ["sst2", "rte"]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    for stream in ("order-09", str(tmp_path / "mine.yaml")):
        with pytest.raises(ConfigError, match="are for reporting; tune on other streams"):
            tune(RunConfig(stream), [stream], [0], "encoder", tmp_path)


def test_every_stream_keeps_its_own_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolving the first must not hand its protocol to the others, whose test rows may be reported."""
    seen = []

    def fake(config: RunConfig, *args: Any, **how: Any) -> list[dict[str, float]]:
        seen.append((config.stream, config.resolved().protocol))
        return [{"average_score": 0.5}]

    monkeypatch.setattr("qtuning.tuning.run", fake)
    base = RunConfig("tuning", method="zero-shot").resolved()
    tune(base, ["tuning", "tuning-long"], [0], "causal", Path())
    assert seen == [("tuning", "given"), ("tuning-long", "tuning")]


def test_tuning_tasks_are_in_no_reported_stream() -> None:
    aside = set(get_stream("tuning").tasks)
    for name in ("demo", "starter-four", "order-09"):
        assert not aside & set(get_stream(name).tasks)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model("bert").save_pretrained("model")
    make_tokenizer("bert").save_pretrained("model")
    stream = {
        "name": "two", "version": 1, "description": "two tasks", "tasks": ["spam", "urgency"]
    }  # fmt: skip
    Path("two.yaml").write_text(yaml.safe_dump(stream))
    flags = ["--model", "./model", "--streams", "two.yaml", "--seeds", "0", "--shots", "2"]
    flags += [
        "--test-limit",
        "2",
        "--max-length",
        "64",
        "--dtype",
        "bf16",
        "--set",
        "queue_size=2",
        "--set",
        "epochs=1",
    ]
    result = CliRunner().invoke(
        app, ["tune", "--method", "per-task-prompt", *flags, "-o", "p.yaml"]
    )
    assert result.exit_code == 0, result.output
    assert result.output.count("prompt_lr") >= 6
    assert set(get_preset("p.yaml")) >= {"prompt_lr", "epochs", "shots", "queue_size"}
    records = [json.loads(f.read_text()) for f in Path("runs/tuning").rglob("result.json")]
    configs = [record["config"] for record in records]
    assert [(config["max_length"], config["dtype"]) for config in configs] == [(64, "bf16")] * 6


def test_a_grid_starts_from_what_a_method_has_in_a_preset() -> None:
    """But not from what was tuned before, or the grid would move with every round."""
    assert start_of("smollm2", "q-tuning-plus") == get_preset("smollm2", "q-tuning-plus")
    assert start_of("smollm2", "q-tuning-plus")["warm_start"] == "answers"
    assert start_of("smollm2", "multi-task") == get_preset("smollm2")
    assert start_of("minilm-tuned", "q-tuning") == get_preset("minilm")
    with pytest.raises(ConfigError, match=r"Unknown method 'ewcc'.*ewc"):
        start_of("smollm2", "ewcc")


def test_a_preset_file_may_have_settings_for_single_methods(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("settings: {epochs: 3}\nmethods: {ewc: {epochs: 5}}\n")
    assert get_preset(file) == {"epochs": 3}
    assert get_preset(file, "ewc") == {"epochs": 5}


def test_a_preset_file_without_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("description: nothing\n")
    with pytest.raises(ConfigError, match="the key 'settings' is missing"):
        get_preset(str(tmp_path / "odd.yaml"))


@pytest.mark.parametrize(
    ("file", "base", "tuned"),
    [("minilm", "minilm", "minilm-tuned"), ("smollm2-weights", "smollm2", "smollm2")],
)
def test_the_tuned_preset_has_the_best_candidate_of_every_method(
    file: str, base: str, tuned: str
) -> None:
    facts = json.loads((ROOT / "results" / f"tuning-{file}.json").read_text())
    common = get_preset(base)
    assert get_preset(tuned, "mbpa++") == common  # not tuned
    for method, tried in facts["methods"].items():
        assert len({str(each["settings"]) for each in tried}) == BUDGET
        best = max(tried, key=lambda each: mean(each["scores"]))
        assert get_preset(tuned, method) == {**common, **best["settings"]}
        config = RunConfig(stream="tuning", method=method, preset=tuned).resolved()
        assert config.settings == {**common, **best["settings"]}
