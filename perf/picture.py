"""The picture of docs/performance.md: perf/results/speed.png, from speed-t5-large-gpu.json.

Run: python perf/picture.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results"
PEER, OURS = "#c2543d", "#1b7f5c"
STEPS = {
    "reference step": "reference loop",
    "peft step, Trainer": "PEFT, Trainer",
    "peft step, eager": "PEFT, eager attention",
    "peft step, sdpa": "PEFT, sdpa",
    "peft step, compiled": "PEFT, compiled",
    "ours alone, captured": "ours alone, captured",
    "ours alone, compiled": "ours alone, compiled",
    "ours packed 8, captured": "ours, 8 runs packed",
    "ours packed 48, captured": "ours, 48 runs packed",
    "ours packed 48, compiled": "ours, 48 packed, compiled",
}


def main() -> None:
    """Left: one training step of one run. Right: a step as the stream grows."""
    record = json.loads((RESULTS / "speed-t5-large-gpu.json").read_text())
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2))
    times = [record["results"][name]["ms"] for name in STEPS]
    places = range(len(STEPS))
    colours = [OURS if name.startswith("ours") else PEER for name in STEPS]
    left.barh(places, times, color=colours)
    for place, time in zip(places, times, strict=True):
        left.text(time * 1.06, place, f"{time:.1f}", va="center", fontsize=9)
    left.set_yticks(places, STEPS.values(), fontsize=9)
    left.invert_yaxis()
    left.set(xscale="log", xlim=(3, 1100), title="one training step of one run (ms, log scale)")
    for method, colour in (("q-tuning", OURS), ("prog-prompt", PEER)):
        own = [e for e in record["growth"] if e["method"] == method and "step_ms" in e]
        tasks, steps = [e["task"] for e in own], [e["step_ms"] for e in own]
        right.plot(tasks, steps, "o-", color=colour, label=method)
    right.set(xscale="log", yscale="log", xlabel="task number", title="a step at task n (ms)")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    card = record["versions"]["device"]
    figure.suptitle(f"T5-large geometry, batch 8, 110 prompt vectors, {card}", fontsize=11)
    figure.tight_layout()
    figure.savefig(RESULTS / "speed.png", dpi=130)


if __name__ == "__main__":
    main()
