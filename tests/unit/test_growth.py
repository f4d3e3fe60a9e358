"""Cost is flat: the figures of `perf/growth.py`, measured again and as committed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"


def by_method(entries: list[dict]) -> dict[str, list[dict]]:
    return {
        name: [e for e in entries if e["method"] == name] for name in ("q-tuning", "prog-prompt")
    }


def test_rows_and_memory_stay_flat_for_qtuning_only(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("growth", PERF / "growth.py")
    growth = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(growth)
    monkeypatch.setattr(growth, "REPEATS", 1)
    found = by_method(growth.measure())
    assert {e["prompt_rows"] for e in found["q-tuning"]} == {50}
    assert [e["prompt_rows"] for e in found["prog-prompt"]] == [50, 200, 600]
    flat = [e["peak_tensor_mib"] for e in found["q-tuning"]]
    assert max(flat) <= 1.02 * min(flat)
    grown = [e["peak_tensor_mib"] for e in found["prog-prompt"]]
    assert grown[2] > 2 * grown[0]


def test_the_committed_figures_say_how_they_were_made() -> None:
    record = json.loads((PERF / "results" / "growth.json").read_text())
    assert {"command", "date", "device", "versions", "backbone", "setting"} <= set(record)
    found = by_method(record["results"])
    times = [e["step_ms"] for e in found["q-tuning"]]
    assert max(times) < 1.2 * min(times)
    assert found["prog-prompt"][2]["step_ms"] > 3 * found["prog-prompt"][0]["step_ms"]
    assert (PERF / "results" / "growth.png").stat().st_size > 10_000
    step = {(own["method"], own["task"]): own["step_ms"] for own in record["results"]}
    times = step["prog-prompt", 60] / step["q-tuning", 60]
    readme = " ".join((PERF.parent / "README.md").read_text(encoding="utf-8").split())
    assert f"a step takes {times:.1f} times as long at task 60" in readme


def test_the_summary_says_what_the_files_say() -> None:
    spec = importlib.util.spec_from_file_location("summary", PERF / "summary.py")
    summary = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(summary)
    committed = json.loads((PERF / "results" / "summary.json").read_text())
    assert committed == summary.summarise()
    assert committed["cpu_train_x"]["value"] > 4
    for figure in committed.values():
        assert figure["value"] is not None or figure["to_measure"].startswith("make ")


def test_the_performance_page_quotes_the_summary() -> None:
    committed = json.loads((PERF / "results" / "summary.json").read_text())
    page = (PERF.parent / "docs" / "performance.md").read_text()
    for name, figure in committed.items():
        if name.endswith("_x"):
            assert f"{figure['value']:.1f} " in page, name
    readme = (PERF.parent / "README.md").read_text()
    for name in ("train_single_x", "train_packed_x", "peft_single_x", "peft_packed_x"):
        assert f"{committed[name]['value']:.1f} " in readme, name
