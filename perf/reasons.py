"""The pictures of docs/findings, reasons-*.png, from committed records.

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

from qtuning.run_labels import label_of

RESULTS = Path(__file__).parent / "results"
RECORDS = Path(__file__).parents[1] / "results"
OURS, OTHERS, CONTROL = "#1b7f5c", "#8a8f98", "#c2543d"
MARKS = {
    "per-task-prompt-long": ("D", CONTROL),
    "per-task-prompt": ("o", OTHERS),
    "shared-prompt": ("v", CONTROL),
    "prog-prompt": ("x", OTHERS),
    "prompt-tuning": ("+", OTHERS),
    "q-tuning": ("s", OURS),
    "q-tuning-plus": ("^", OURS),
}


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


def label(entry: dict[str, Any]) -> str:
    """Method, learning rate, switches."""
    own = {k: v for k, v in entry["settings"].items() if k != "prompt_lr"}
    words = [entry["method"], str(entry["settings"]["prompt_lr"])]
    if "keep_prompts" in own:  # its many settings as what they come to
        frozen = own.get("prompt_length", 10) * (own.get("queue_size", 5) - 1)
        own = {"vocabulary rows": frozen, **{k: own[k] for k in own if k == "warm_start"}}
    return ", ".join([*words, *(f"{name} {value}" for name, value in own.items())])


def when_learnt() -> tuple[list[str], dict[str, list[float]]]:
    """Tasks of orders 8 to 10, and for each method the mean of their scores when learnt, over orders and seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for file in sorted((RECORDS / "long-smollm2").glob("*/*/*/result.json")):
        record = json.loads(file.read_text())
        if label_of(record) not in MARKS:  # something was changed
            continue
        own = found.setdefault(record["method"], {})
        for task, facts in record["tasks"].items():
            own.setdefault(task, []).append(100 * facts["when_learnt"])
    control = found["per-task-prompt-long"]
    tasks = sorted(control, key=lambda task: -mean(control[task]))
    return tasks, {method: [mean(own[task]) for task in tasks] for method, own in found.items()}


def draw_scales() -> None:
    """A square for every pair: how much a task turned an earlier prompt up or down."""
    names, found = scales()
    figure, axis = heatmap(names, found, 1.0, 0.1, ".2f", "task that learns")
    axis.set_title("learnt scale, mean over a prompt's rows")
    _save(figure, "reasons-scale.png")


def draw_tried(round_of_tuning: str, tasks: str, picture: str) -> None:
    """A line for every candidate: each seed a dot."""
    record = json.loads((RECORDS / f"tuning-smollm2-{round_of_tuning}.json").read_text())
    figure, axis = pyplot.subplots(figsize=(7.5, 1.4 + 0.2 * len(record["tried"])))
    entries = sorted(record["tried"], key=lambda each: -each["mean"])
    for place, entry in enumerate(entries):
        scores = [100 * mean(own.values()) for own in entry["scores"].values()]
        is_ours = entry["method"].startswith("q-tuning") or "warm_start" in entry["settings"]
        colour = OURS if is_ours else CONTROL if entry["method"].endswith("long") else OTHERS
        axis.plot(scores, [place] * len(scores), "o", color=colour, markersize=5)
        axis.plot([mean(scores)], [place], "|", color=colour, markersize=16, markeredgewidth=2.5)
    axis.set_yticks(range(len(entries)), [label(entry) for entry in entries], fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel=f"average of {tasks} tuning tasks, %")
    axis.grid(axis="x", alpha=0.3)
    _save(figure, picture)


def draw_tasks() -> None:
    """A line for every task, a mark for every method: where the methods differ."""
    tasks, found = when_learnt()
    figure, axis = pyplot.subplots(figsize=(7.5, 4.6))
    for method in found:
        mark, colour = MARKS[method]
        axis.plot(
            found[method], range(len(tasks)), mark, color=colour, label=method, alpha=0.85, ms=7
        )
    axis.set_yticks(range(len(tasks)), tasks)
    axis.invert_yaxis()
    axis.set(xlabel="score when learnt, %", title="SmolLM2-135M, orders 8 to 10")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="lower right")
    _save(figure, "reasons-tasks.png")


def draw_lifelong() -> None:
    """How far each method is from a short prompt per task after so many tasks, and what one more task costs."""
    runs: dict[str, list[list[float]]] = {}
    for file in (RECORDS / "lifelong-smollm2" / "order-11").glob("*/*/result.json"):
        record = json.loads(file.read_text())
        scores = [task["when_learnt"] for task in record["tasks"].values()]
        runs.setdefault(label_of(record), []).append(scores)
        if label_of(record) == "q-tuning":  # a pack's seconds: the same for all of its runs
            seconds = [cost["seconds"] for cost in record["costs"]]
    places = np.arange(1, 71)
    so_far = {method: np.mean(own, axis=0).cumsum() / places for method, own in runs.items()}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.8))
    base = so_far["per-task-prompt"]
    left.axhline(0, color=OTHERS, label="per-task-prompt")
    alone = "q-tuning, retention none, scale false, shared_length 0"
    for method in (
        "q-tuning-plus", "per-task-prompt-long", "shared-prompt", "q-tuning", alone, "prog-prompt",
    ):  # fmt: skip
        mark, colour = MARKS[method.split(",")[0]]
        line, name = ("--", "the queue alone") if method == alone else ("-", method)
        ahead = 100 * (so_far[method] - base)
        left.plot(places, ahead, f"{line}{mark}", color=colour, label=name, ms=5, markevery=10)
    left.set(xlabel="tasks learnt", ylabel="points above per-task-prompt", xlim=(5, None))
    left.set(title="average so far, order 11", ylim=(-6, 6))
    left.grid(alpha=0.3)
    left.legend(fontsize=8, ncols=2)
    right.plot(range(2, len(seconds) + 1), seconds[1:], "o", color=OURS, ms=4)
    right.set(xlabel="task", ylabel="seconds of a run to learn it", ylim=(0, 0.6))
    right.set(title="the cost of one more task")
    right.grid(alpha=0.3)
    right.spines[["top", "right"]].set_visible(False)
    _save(figure, "reasons-lifelong.png")


def draw_quick() -> None:
    """A line for every method, from 20 steps a task to 160, each seed a mark."""
    found: dict[str, dict[int, list[float]]] = {}
    for folder in ("quick-smollm2", "lifelong-smollm2"):
        for file in sorted((RECORDS / folder / "order-11").glob("*/*/result.json")):
            record = json.loads(file.read_text())
            if label_of(record) in MARKS:
                own = found.setdefault(record["method"], {})
                steps = own.setdefault(record["settings"]["most_steps"], [])
                steps.append(100 * record["average_score"])
    figure, axis = pyplot.subplots(figsize=(6.4, 4))
    both = {method: own for method, own in found.items() if len(own) == 2}
    for method, own in sorted(both.items(), key=lambda each: -mean(each[1][20])):
        mark, colour = MARKS[method]
        line = "-" if method.startswith(("q-tuning", "shared")) else "--"
        label = f"{method}, {mean(own[20]):.1f} and {mean(own[160]):.1f}"
        means = [mean(own[steps]) for steps in (20, 160)]
        axis.plot([20, 160], means, f"{line}{mark}", color=colour, lw=1.5, label=label)
        for steps in (20, 160):
            axis.plot([steps] * len(own[steps]), own[steps], mark, color=colour, alpha=0.4)
    axis.set(xscale="log", xlabel="steps a task", ylabel="average of 70 tasks (order 11), %")
    axis.set_xticks([20, 160], ["20", "160"])
    axis.minorticks_off()
    axis.set_xlim(16, 200)
    axis.set_title(
        "SmolLM2-135M, 20 texts per class, pale: single seeds\nsolid: something is taken over"
    )
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="lower right")
    _save(figure, "reasons-quick.png")


def draw_shared() -> None:
    """Tens of the 70 tasks in the order of learning: a shared prompt that is kept once, then and at the end; others."""
    order, ten = "order-11", 10

    def by_tens(folder: str, method: str, key: str) -> np.ndarray:
        files = (RECORDS / folder / order / method).glob("*/result.json")
        records = [json.loads(file.read_text()) for file in files]
        plain = [record["tasks"].values() for record in records if label_of(record) == method]
        scores = np.array([[100 * task[key] for task in tasks] for tasks in plain])
        return scores.reshape(len(scores), -1, ten).mean(axis=(0, 2))

    then = by_tens("shared-smollm2", "shared-prompt", "when_learnt")
    now = by_tens("shared-smollm2", "shared-prompt", "score")
    figure, axis = pyplot.subplots(figsize=(6.4, 4))
    places = np.arange(len(then))
    axis.vlines(places, now, then, color=CONTROL, lw=2)
    label = "one shared prompt for all tasks, "
    axis.plot(places, then, "v", mfc="none", color=CONTROL, ms=9, label=f"{label}when learnt")
    axis.plot(places, now, "v", color=CONTROL, ms=9, label=f"{label}at the end")
    for method in ("q-tuning", "per-task-prompt"):
        mark, colour = MARKS[method]
        scores = by_tens("quick-smollm2", method, "score")
        axis.plot(places, scores, f"-{mark}", color=colour, label=f"{method}, then and now")
    axis.set_xticks(places, [f"{ten * i + 1}–{ten * (i + 1)}" for i in places])
    axis.set(xlabel="tasks in the order of learning", ylabel="average score, %", ylim=(45, 92))
    axis.set_title("SmolLM2-135M, 70 tasks (order 11) with 20 steps each")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="lower right")
    _save(figure, "reasons-shared.png")


def draw_shots() -> None:
    """A line for every method over texts per class, each seed a mark."""
    figure, axis = pyplot.subplots(figsize=(6, 3.4))
    for method in ("per-task-prompt-long", "q-tuning", "prog-prompt"):
        found: dict[int, list[float]] = {}
        for folder in ("long-smollm2", "shots-smollm2"):
            for file in (RECORDS / folder / "order-09" / method).glob("[012]-*/result.json"):
                record = json.loads(file.read_text())
                if "eviction" not in record["config"]["settings"]:
                    scores = found.setdefault(record["settings"]["shots"], [])
                    scores.append(100 * record["average_score"])
        mark, colour = MARKS[method]
        shots = sorted(found)
        axis.plot(shots, [mean(found[n]) for n in shots], color=colour, label=method)
        for n in shots:
            axis.plot([n] * len(found[n]), found[n], mark, color=colour, alpha=0.7)
    axis.set(xscale="log", xlabel="texts per class", ylabel="average of order 9, %")
    axis.set_xticks([20, 200, 1000], ["20", "200", "1,000"])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    _save(figure, "reasons-shots.png")


def draw_forgetting() -> None:
    """Tasks in the order of learning: what one model had of each when learnt and has at the end, beside what keeps."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 4.4))
    for axis, order, prompts in zip(
        axes, ("order-01", "order-09"), ("short-smollm2", "long-smollm2"), strict=True
    ):
        found: dict[str, dict[str, list[tuple[float, float]]]] = {}
        kept = ("q-tuning-plus", "per-task-finetune")
        for method in ("continual-finetune", *kept):
            folder = "finetuning-smollm2" if method.endswith("finetune") else prompts
            for file in sorted((RECORDS / folder / order / method).glob("[012]-*/result.json")):
                for task, facts in json.loads(file.read_text())["tasks"].items():
                    own = found.setdefault(method, {}).setdefault(task, [])
                    own.append((100 * facts["when_learnt"], 100 * facts["score"]))
        tasks = list(found["continual-finetune"])
        then, now = np.mean([found["continual-finetune"][task] for task in tasks], axis=1).T
        places = np.arange(len(tasks))
        axis.hlines(places, then, now, color=CONTROL, lw=2)
        axis.plot(
            then, places, "o", mfc="none", color=CONTROL, label="one model, when learnt", ms=10
        )
        axis.plot(now, places, "o", color=CONTROL, label="one model, at the end")
        for method in kept:
            mark, colour = MARKS.get(method, ("D", OTHERS))
            scores = [np.mean(found[method][task]) for task in tasks]
            axis.plot(scores, places, mark, color=colour, label=f"{method}, then and now", ms=6)
        axis.set_yticks(places, tasks)
        axis.invert_yaxis()
        axis.set(xlabel="score, %", title=f"SmolLM2-135M, {order.replace('-0', ' ')}")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=4, loc="lower center")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(RESULTS / "reasons-forgetting.png", dpi=120)


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
    draw_tried("averaged", "five", "reasons-length.png")
    draw_tried("starts", "all eight", "reasons-starts.png")
    draw_tasks()
    draw_lifelong()
    draw_quick()
    draw_shared()
    draw_shots()
    draw_forgetting()
    draw_transfer()
