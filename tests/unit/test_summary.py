"""The summary of records, from records written by hand."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qtuning.cli import app
from qtuning.errors import RecordError
from qtuning.presets import get_preset
from qtuning.report.gather import gather
from qtuning.run_labels import label_of
from qtuning.summary import LENGTH_MATCHED, LIFELONG, LONG, summarise


def record(
    stream: str = "order-08",
    method: str = "q-tuning",
    seed: int = 0,
    score: float = 0.5,
    *,
    preset: str = "minilm",
    changed: dict[str, Any] | None = None,
    seconds: list[float] | None = None,
    transfer: float | None = 0.0,
    **config: Any,
) -> dict[str, Any]:
    """A record with what a summary reads; settings as a command line gives them, and as they were read."""
    given = {**(get_preset(preset, method) if preset == "minilm" else {}), **(changed or {})}
    read = {"shots": 16, "epochs": 15, "validation_limit": 500, **given}
    read = {key: int(v) if str(v).isdigit() else v for key, v in read.items()}
    asked = {
        "stream": stream, "method": method, "model": "minilm", "protocol": "given", "dtype": "fp32",
        "max_length": None, "test_limit": 250, "preset": preset, "settings": given, **config,
    }  # fmt: skip
    return {
        "schema": 1,
        "config": asked,
        "settings": read,
        "seed": seed,
        "stream": stream,
        "method": method,
        "backbone": {"name": asked["model"]},
        "average_score": score,
        "backward_transfer": transfer,
        "tasks": {f"task-{i}": {"seconds": each} for i, each in enumerate(seconds or [1.0])},
        "versions": {"torch": "2.11", "device": "cpu"},
        "folder": f"{stream}/{method}/{seed}",
    }


def all_orders(
    method: str, seed: int, scores: tuple[float, float, float], **more: Any
) -> list[Any]:
    return [record(o, method, seed, s, **more) for o, s in zip(LONG, scores, strict=True)]


def test_means_and_deviations_by_hand() -> None:
    found = summarise(
        [*all_orders("q-tuning", 0, (0.5, 0.6, 0.7)), *all_orders("q-tuning", 1, (0.7, 0.8, 0.9))]
    )
    facts = found["long_sequence"]["minilm"]["q-tuning"]
    sd = round(0.2 / 2**0.5, 6)
    assert facts["orders"]["order-09"] == {
        "mean": 0.7, "sd": sd, "n": 2, "seeds": {"0": 0.6, "1": 0.8}
    }  # fmt: skip
    assert facts["average"] == {"mean": 0.7, "sd": sd, "n": 2, "seeds": {"0": 0.6, "1": 0.8}}
    assert facts["minus_length_matched"] is None  # no control here
    assert found["lifelong"] == {}


def test_pairs_are_seeds_that_both_have_whole() -> None:
    results = []
    gains = {0: 0.01, 1: 0.03, 2: 0.02}
    for seed, gain in gains.items():
        results += all_orders("per-task-prompt-long", seed, (0.5, 0.6, 0.7))
        results += all_orders("q-tuning", seed, (0.5 + gain, 0.6 + gain, 0.7 + gain))
    results += all_orders("q-tuning", 3, (0.9, 0.9, 0.9))  # no partner
    results.append(record("order-08", "per-task-prompt-long", 4, 0.1))  # not whole
    results += all_orders("q-tuning", 4, (0.9, 0.9, 0.9))
    labels = summarise(results)["long_sequence"]["minilm"]
    assert labels["q-tuning"]["average"]["n"] == 5
    assert labels["q-tuning"]["minus_length_matched"] == {
        "control": "per-task-prompt-long", "mean": 0.02, "sd": 0.01, "n": 3, "p": 0.25,
        "seeds": {"0": 0.01, "1": 0.03, "2": 0.02},
    }  # fmt: skip
    assert statistics.stdev(gains.values()) == pytest.approx(0.01)
    control = labels["per-task-prompt-long"]
    assert "minus_length_matched" not in control
    assert control["average"]["seeds"] == {"0": 0.6, "1": 0.6, "2": 0.6}
    assert control["orders"]["order-08"]["n"] == 4


def test_a_missing_order_leaves_the_average_out() -> None:
    results = all_orders("q-tuning", 0, (0.5, 0.6, 0.7))[:2]
    facts = summarise(results)["long_sequence"]["minilm"]["q-tuning"]
    assert facts["average"] is None
    assert facts["minus_length_matched"] is None
    assert list(facts["orders"]) == ["order-08", "order-09"]
    assert facts["orders"]["order-08"]["sd"] is None


def test_the_control_ran_under_the_same_conditions() -> None:
    results = all_orders("q-tuning", 0, (0.7, 0.7, 0.7), changed={"shots": 20, "eviction": "fifo"})
    results += all_orders("q-tuning", 0, (0.7, 0.7, 0.7), changed={"shots": 20, "queue_size": 5})
    results += all_orders("q-tuning", 0, (0.7, 0.7, 0.7), changed={"shots": 20, "eviction": "none"})
    results += all_orders("per-task-prompt-long", 0, (0.6, 0.6, 0.6), changed={"shots": 20})
    results += all_orders("per-task-prompt-long", 0, (0.5, 0.5, 0.5))
    labels = summarise(results)["long_sequence"]["minilm"]
    found = labels["q-tuning, eviction fifo, shots 20"]["minus_length_matched"]
    assert found["control"] == "per-task-prompt-long, shots 20"
    assert found["mean"] == 0.1
    assert found["p"] == 1.0
    # as many rows as another queue has, or ever more: nobody ran that control
    assert labels["q-tuning, eviction none, shots 20"]["minus_length_matched"] is None
    assert labels["q-tuning, queue_size 5, shots 20"]["minus_length_matched"] is None
    assert "minus_length_matched" not in labels["per-task-prompt-long, shots 20"]


def test_labels_name_what_a_preset_was_changed_to() -> None:
    assert label_of(record()) == "q-tuning"
    changed = {
        "queue_size": "5",
        "eviction": "fifo",
        "epochs": "15",
        "prompt_lr": 0.0030,
        "mlp": True,
    }
    wanted = "q-tuning, eviction fifo, mlp true, prompt_lr 0.003, queue_size 5"
    assert label_of(record(changed=changed)) == wanted  # epochs are those of the preset
    assert label_of(record(preset="", changed={"epochs": 3})) == "q-tuning"
    assert (
        label_of(record(preset="/gone/tuned.yaml", changed={"epochs": 3}))
        == "q-tuning, preset tuned"
    )
    assert label_of(record(preset="no-such")) == "q-tuning, preset no-such"


def test_a_preset_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("settings: {epochs: 3, weights_lr: 1e-4}\n")  # YAML reads 1e-4 as text
    given = {"epochs": 3, "weights_lr": "1e-4", "shots": 8}
    assert label_of(record(preset=str(file), changed=given)) == "q-tuning, shots 8"


def test_different_configs_are_kept_apart() -> None:
    results = all_orders("q-tuning", 0, (0.5, 0.6, 0.7))
    results.append(record("order-08", "q-tuning", 0, 0.9, test_limit=100))
    results += all_orders("linear-probe", 0, (0.3, 0.3, 0.3))
    labels = summarise(results)["long_sequence"]["minilm"]
    assert list(labels) == ["linear-probe", "q-tuning, test_limit 100", "q-tuning, test_limit 250"]
    assert labels["q-tuning, test_limit 250"]["average"]["mean"] == 0.6
    assert labels["q-tuning, test_limit 100"]["average"] is None


def test_so_are_presets_and_settings_without_a_preset() -> None:
    results = [
        record(score=0.1),
        record(score=0.2, preset="", changed={"epochs": 3}),
        record(score=0.3, preset="", changed={"epochs": "4", "thaw": False}, seed=1),
    ]
    labels = summarise(results)["long_sequence"]["minilm"]
    assert {label: facts["orders"]["order-08"]["mean"] for label, facts in labels.items()} == {
        "q-tuning, preset minilm": 0.1,
        "q-tuning, preset none, epochs 3": 0.2,
        "q-tuning, preset none, epochs 4, thaw false": 0.3,
    }


def test_the_same_run_twice_is_refused() -> None:
    with pytest.raises(RecordError, match=r"same run \(q-tuning, order-08, seed 0\); leave one"):
        summarise([record(), record(score=0.6)])


def test_a_control_is_found_by_its_conditions() -> None:
    """Whatever else there is: labels say only what sets runs apart, and a second preset changes some of them."""
    alike = [("q-tuning", 0.5, {}), ("q-tuning", 0.6, {"eviction": "fifo"}), (LENGTH_MATCHED, 0.4, {})]  # fmt: skip
    results = [record(o, m, score=s, changed=c) for o in LONG for m, s, c in alike]
    other = [record(o, LENGTH_MATCHED, score=0.1, preset="other", inner_rows=0) for o in LONG]
    alone = summarise(results)["long_sequence"]["minilm"]
    both = summarise([*results, *other])["long_sequence"]["minilm"]
    for label in ("q-tuning", "q-tuning, eviction fifo"):
        found = [labels[label]["minus_length_matched"] for labels in (alone, both)]
        assert found[0]["mean"] == found[1]["mean"] > 0
        assert found[0]["control"] in alone
        assert found[1]["control"] in both
    assert both[found[1]["control"]]["average"]["mean"] == 0.4


def test_backbones_stay_apart() -> None:
    found = summarise([record(), record(model="bge-small", test_limit=9)])
    assert {name: list(labels) for name, labels in found["long_sequence"].items()} == {
        "bge-small": ["q-tuning"],
        "minilm": ["q-tuning"],
    }


def test_lifelong_streams() -> None:
    rising = [float(i) for i in range(70)]
    results = [
        record("order-11", seed=0, score=0.4, seconds=rising, transfer=-0.02, test_limit=100),
        record("order-11", seed=1, score=0.6, seconds=rising, transfer=0.01, test_limit=100),
        record("order-13", seed=0, score=0.3, transfer=None, test_limit=100),
        record("order-08"),
    ]
    found = summarise(results)
    orders = found["lifelong"]["minilm"]["q-tuning"]["orders"]
    assert orders["order-11"] == {
        "mean": 0.5, "sd": round(0.2 / 2**0.5, 6), "n": 2, "seeds": {"0": 0.4, "1": 0.6},
        "backward_transfer": -0.02, "tasks": 70, "seconds_first_ten": 4.5, "seconds_last_ten": 64.5,
    }  # fmt: skip
    assert orders["order-13"]["backward_transfer"] is None
    assert found["lifelong"]["minilm"]["q-tuning"]["average"] is None  # no run of order 12
    whole = summarise([*results, record("order-12", seed=0, score=0.8, test_limit=100)])
    average = whole["lifelong"]["minilm"]["q-tuning"]["average"]
    assert average == {"mean": 0.5, "sd": None, "n": 1, "seeds": {"0": 0.5}}
    assert whole["lifelong"]["minilm"]["q-tuning"]["minus_length_matched"] is None
    controls = [record(o, LENGTH_MATCHED, score=0.4, test_limit=100) for o in LIFELONG]
    both = summarise([*results, record("order-12", score=0.8, test_limit=100), *controls])
    paired = both["lifelong"]["minilm"]["q-tuning"]["minus_length_matched"]
    assert (paired["control"], paired["mean"], paired["n"]) == (LENGTH_MATCHED, 0.1, 1)
    conditions = found["conditions"]["minilm"]["q-tuning"]
    assert conditions["lifelong"]["test_limit"] == [100]
    assert conditions["long_sequence"]["test_limit"] == [250]


def test_conditions_name_every_value_that_occurs() -> None:
    results = [record(changed={"shots": "20"}), record(seed=1, changed={"shots": "20"})]
    results[1]["versions"]["torch"] = "2.13"
    found = summarise(results)["conditions"]["minilm"]["q-tuning, shots 20"]["long_sequence"]
    assert found == {
        "preset": ["minilm"], "protocol": ["given"], "test_limit": [250], "max_length": [None],
        "dtype": ["fp32"], "shots": [20], "epochs": [15], "most_steps": [0], "average": [0], "validation_limit": [500],
        "versions": {"torch": ["2.11", "2.13"], "device": ["cpu"]},
    }  # fmt: skip


def write(results: list[dict[str, Any]], root: Path) -> None:
    for number, result in enumerate(results):
        (root / str(number)).mkdir(parents=True)
        (root / str(number) / "result.json").write_text(json.dumps(result))


def test_the_command(tmp_path: Path) -> None:
    results = all_orders("per-task-prompt-long", 0, (0.5, 0.6, 0.7))
    results += all_orders("q-tuning", 0, (0.6, 0.7, 0.8))
    write([*results, record("order-11"), record("starter-four")], tmp_path / "runs")
    (tmp_path / "runs" / "half").mkdir()
    (tmp_path / "runs" / "half" / "result.json").write_text("{half")
    output = tmp_path / "new" / "summary.json"
    said = CliRunner().invoke(app, ["summary", str(tmp_path / "runs"), "-o", str(output)])
    assert said.exit_code == 0, said.output
    assert "8 finished runs read" in said.output
    assert "not readable" in said.output
    assert "+10.0" in said.output
    first, second = said.output.index("  q-tuning "), said.output.index("  per-task-prompt-long ")
    assert first < second  # the better one
    assert json.loads(output.read_text()) == summarise(gather([tmp_path / "runs"]).results)


def test_what_cannot_be_summed_up_is_said(tmp_path: Path) -> None:
    def asked(*words: str) -> str:
        return str(CliRunner().invoke(app, ["summary", *words]).exception)

    assert "there is no folder" in asked(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "no records under" in asked(str(tmp_path / "empty"))
    write([record("starter-four")], tmp_path / "other")
    assert "no finished run of order-08 to order-13" in asked(str(tmp_path / "other"))
    assert "must end in .json, got 'a.md'" in asked(str(tmp_path / "other"), "-o", "a.md")
