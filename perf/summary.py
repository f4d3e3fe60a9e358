"""The figures of perf/results in one file: perf/results/summary.json, each with the file it came from.

A figure whose measurement has not been made is null, with the command that makes it.

Run: python perf/summary.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
COMMANDS = {
    "speed-t5-large-gpu.json": "make speed-gpu",
    "speed-smollm2-135m-gpu.json": "make speed-gpu",
    "speed-t5-small-cpu.json": "make speed-cpu",
    "speed-t5-small-cpu-bf16.json": "make speed-cpu",
}


def milliseconds(record: dict[str, Any], name: str) -> float:
    """A candidate's median."""
    return float(record["results"][name]["ms"])


def fastest_pack(record: dict[str, Any], retention: bool = False) -> float:
    """The best of our packs, per lane; with retention or, like the peers, without."""
    found = [
        value["ms"]
        for name, value in record["results"].items()
        if name.startswith("ours packed") and ("retention" in name) == retention
    ]
    return float(min(found))


def best_peft(record: dict[str, Any]) -> float:
    """PEFT's best eager variant."""
    return min(milliseconds(record, f"peft step, {way}") for way in ("eager", "sdpa"))


def over_reference(record: dict[str, Any], what: str, ours: str) -> float:
    """How many times as fast as the reference loop's step or row."""
    return milliseconds(record, f"reference {what}") / milliseconds(record, ours)


def growth_ratio(record: dict[str, Any]) -> float:
    """Q-tuning's step at task 1,000 over that at task 12."""
    steps = {e["task"]: e["step_ms"] for e in record["growth"] if e["method"] == "q-tuning"}
    return float(steps[1000] / steps[12])


FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "train_single_x": (
        "speed-t5-large-gpu.json",
        lambda r: over_reference(r, "step", "ours alone, compiled"),
    ),
    "train_packed_x": (
        "speed-t5-large-gpu.json",
        lambda r: milliseconds(r, "reference step") / fastest_pack(r),
    ),
    "train_packed_retention_x": (
        "speed-t5-large-gpu.json",
        lambda r: milliseconds(r, "reference step") / fastest_pack(r, retention=True),
    ),
    "packed_matrix_share": (
        "speed-t5-large-gpu.json",
        lambda r: 1000 * r["ideal_step_tflop"] / fastest_pack(r) / r["matrix_tflops"],
    ),
    "eval_x": (
        "speed-t5-large-gpu.json",
        lambda r: over_reference(r, "row", "ours row"),
    ),
    "eval_long_answer_x": (
        "speed-t5-large-gpu.json",
        lambda r: over_reference(r, "row, long answer", "ours row, long answer"),
    ),
    "epoch_x": (
        "speed-t5-large-gpu.json",
        lambda r: (
            r["epoch_ms"]["reference"]
            / min(
                v
                for k, v in r["epoch_ms"].items()
                if k.startswith("ours packed") and "retention" not in k
            )
        ),
    ),
    "peft_single_x": (
        "speed-t5-large-gpu.json",
        lambda r: best_peft(r) / milliseconds(r, "ours alone, compiled"),
    ),
    "peft_packed_x": (
        "speed-t5-large-gpu.json",
        lambda r: best_peft(r) / fastest_pack(r),
    ),
    "smollm2_packed_x": (
        "speed-smollm2-135m-gpu.json",
        lambda r: milliseconds(r, "ours alone, eager") / fastest_pack(r),
    ),
    "cpu_train_x": (
        "speed-t5-small-cpu.json",
        lambda r: over_reference(r, "step", "ours alone, eager"),
    ),
    "cpu_eval_x": (
        "speed-t5-small-cpu.json",
        lambda r: over_reference(r, "row", "ours row"),
    ),
    "cpu_peft_x": (
        "speed-t5-small-cpu.json",
        lambda r: best_peft(r) / milliseconds(r, "ours alone, eager"),
    ),
    "cpu_bf16_train_x": (
        "speed-t5-small-cpu-bf16.json",
        lambda r: over_reference(r, "step", "ours alone, eager"),
    ),
    "cpu_bf16_eval_x": (
        "speed-t5-small-cpu-bf16.json",
        lambda r: over_reference(r, "row", "ours row"),
    ),
    "growth_time_1000_over_12": ("speed-t5-large-gpu.json", growth_ratio),
}


def summarise(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Every figure, from the files that are there."""
    summary: dict[str, dict[str, Any]] = {}
    for name, (file, compute) in FIGURES.items():
        try:
            value = round(compute(json.loads((folder / file).read_text())), 3)
            summary[name] = {"value": value, "file": file}
        except (FileNotFoundError, KeyError, ValueError):  # not measured, or not to the end
            summary[name] = {"value": None, "file": file, "to_measure": COMMANDS[file]}
    return summary


def main() -> None:
    """Write the summary."""
    found = summarise()
    (RESULTS / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, figure in found.items():
        print(f"{name:28} {figure['value']}")


if __name__ == "__main__":
    main()
