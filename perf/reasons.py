"""The pictures of docs/findings.md, from committed records: reasons-scale.png, -length.png, -transfer.png.

Run: python perf/reasons.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results"
RECORDS = Path(__file__).parents[1] / "results"
OURS, OTHERS, CONTROL = "#1b7f5c", "#8a8f98", "#c2543d"


def scales() -> tuple[list[str], np.ndarray]:
    """Mean scale that each task of order 9 gave to each prompt, [tasks, prompts], until the queue was full."""
    files = sorted((RECORDS / "order-09-minilm" / "q-tuning").glob("*/result.json"))
    records = [json.loads(file.read_text()) for file in files]
    records = [r for r in records if r["config"]["preset"] == "minilm"]
    names = list(records[0]["tasks"])[: records[0]["settings"]["queue_size"]]
    length = records[0]["settings"]["prompt_length"]
    found = np.full((len(names), len(names)), np.nan)
    for i, name in enumerate(names):
        rows = np.mean([r["tasks"][name]["scale"] for r in records], axis=0)
        found[i, : i + 1] = rows.reshape(-1, length).mean(axis=1)
    return names, found


def tried() -> list[dict[str, Any]]:
    """What was tried on SmolLM2, best first."""
    record = json.loads((RECORDS / "tuning-smollm2.json").read_text())
    return sorted(record["tried"], key=lambda each: -each["mean"])


def label(entry: dict[str, Any]) -> str:
    """Method, switches, learning rate."""
    own = {k: v for k, v in entry["settings"].items() if k != "prompt_lr"}
    if own.get("thaw"):
        return f"q-tuning-plus, {entry['settings']['prompt_lr']}"
    words = [entry["method"], *(["warm start"] if "warm_start" in own else [])]
    words += ["labels, decay"] if "loss_over" in own else []
    return f"{', '.join(words)}, {entry['settings']['prompt_lr']}"


def draw_scales() -> None:
    """A square for every pair: how much a task turned an earlier prompt up or down."""
    names, found = scales()
    figure, axis = heatmap(names, found, 1.0, 0.1, ".2f", "task that learns")
    axis.set_title("learnt scale, mean over a prompt's rows")
    _save(figure, "reasons-scale.png")


def draw_tried() -> None:
    """A line for every candidate: each seed a dot."""
    figure, axis = pyplot.subplots(figsize=(7.5, 3.8))
    entries = tried()
    for place, entry in enumerate(entries):
        scores = [100 * score for score in entry["scores"].values()]
        is_ours = entry["method"] == "q-tuning"
        colour = OURS if is_ours else CONTROL if entry["method"].endswith("long") else OTHERS
        axis.plot(scores, [place] * len(scores), "o", color=colour, markersize=5)
        axis.plot([mean(scores)], [place], "|", color=colour, markersize=16, markeredgewidth=2.5)
    axis.set_yticks(range(len(entries)), [label(entry) for entry in entries], fontsize=8)
    axis.invert_yaxis()
    axis.set(
        xlabel="average score, %",
        title="SmolLM2-135M on the tuning stream",
    )
    axis.grid(axis="x", alpha=0.3)
    _save(figure, "reasons-length.png")


def draw_transfer() -> None:
    """Which prompt explains which task: the loss under it, less the loss under a prompt from the vocabulary."""
    record = json.loads((RESULTS / "transfer-smollm2.json").read_text())
    names = list(record["loss"])
    gain = np.array(
        [[record["loss"][t][p] - record["loss"][t]["vocabulary"] for p in names] for t in names]
    )
    others = gain + np.diag([np.inf] * len(names))
    figure, axis = heatmap(names, gain, 0.0, abs(gain).max(), "+.1f", "texts of", others.argmin(1))
    axis.set_title("loss under another task's prompt, against a fresh one")
    _save(figure, "reasons-transfer.png")


def heatmap(
    names: list[str],
    values: np.ndarray,
    middle: float,
    reach: float,
    form: str,
    rows: str,
    bold: np.ndarray | None = None,
) -> tuple[Any, Any]:
    """A square for every pair, coloured by its distance from the middle; one of each row may be bold."""
    figure, axis = pyplot.subplots(figsize=(6.2, 5))
    colours = "PuOr" if middle else "PuOr_r"  # purple is what helps: a larger scale, a lower loss
    image = axis.imshow(values, cmap=colours, vmin=middle - reach, vmax=middle + reach)
    for i, j in np.argwhere(~np.isnan(values)):
        axis.text(
            j,
            i,
            format(values[i, j], form),
            ha="center",
            va="center",
            fontsize=8,
            weight="bold" if bold is not None and bold[i] == j else "normal",
            color="white" if abs(values[i, j] - middle) > 0.6 * reach else "black",
        )
    axis.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set(xlabel="prompt of", ylabel=rows)
    figure.colorbar(image, shrink=0.8)
    return figure, axis


def _save(figure: Any, name: str) -> None:
    for axis in figure.axes[:1]:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(RESULTS / name, dpi=120)


if __name__ == "__main__":
    draw_scales()
    draw_tried()
    draw_transfer()
