"""`qtuning demo`: one frozen model learns eight tasks, evicts from its queue, and forgets nothing."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text as Styled

from qtuning import __version__
from qtuning.backbones import weights_sha256
from qtuning.collection import MANIFEST, check_target, read_collection
from qtuning.config import settings_dict
from qtuning.data import load_task
from qtuning.errors import CollectionError, ConfigError
from qtuning.evaluation import (
    average_score,
    backward_transfer,
    majority_share,
    score_predictions,
)
from qtuning.files import write_atomic
from qtuning.methods import make_method
from qtuning.progress import LearningBar
from qtuning.records import memory
from qtuning.report.gather import Records
from qtuning.report.page import render_page
from qtuning.runs import RunConfig, result_of
from qtuning.seeding import numpy_generator
from qtuning.snapshots import predict_log_probs
from qtuning.stream_loop import StreamRun, run_stream
from qtuning.streams import get_stream
from qtuning.tasks import Task
from qtuning.tuner import QTuner

SETTINGS: dict[str, Any] = {
    "prompt_length": 5,
    "shared_length": 5,
    "queue_size": 4,
    "epochs": 10,
    "validate_every": 2,
}
"""Small, so that eight tasks fit a coffee break on two cores and the queue overflows four times."""


def run_demo(
    output: Path,
    model: str = "minilm",
    seed: int = 0,
    console: Console | None = None,
    record: Path | None = None,
) -> None:
    """Learn the demo stream, show the score matrix, save the collection; `record` takes the figures as JSON."""
    console = console or Console()
    stream = get_stream("demo")
    _check_output(output, stream.tasks)
    tasks = [load_task(name) for name in stream.tasks]
    began, started = time.perf_counter(), datetime.now(UTC)
    console.print(
        f"[bold]One frozen model, {len(tasks)} tasks, 16 examples per class.[/bold] Loading {model} …"
    )
    tuner = QTuner(model, seed=seed, **SETTINGS)
    if tuner.backbone.family != "encoder":
        raise ConfigError(
            f"the demo needs an encoder, and {model!r} is a {tuner.backbone.family} model; use minilm."
        )
    before = weights_sha256(tuner.backbone)
    result, stored, costs = _learn(tuner, tasks, console)
    tuner.adopt(result.state)
    console.print(_matrix_table(result))
    with console.status("a linear probe on the same texts …"):
        figures = _figures(tuner, tasks, result, before)
    console.print(_summary_table(figures))
    _show_predictions(tuner, tasks, result, console)
    tuner.save_pretrained(output, overwrite=True)
    page = output.with_name(f"{output.name}-report.html")
    config = RunConfig(
        stream.name, model=model, inner_rows=max(len(s.test) for s in result.splits.values())
    )
    settings = settings_dict(tuner.method_settings, tuner.train_settings)
    facts = result_of(config.resolved(), result, tuner.backbone, settings, stored, costs, started)
    write_atomic(page, render_page(Records([{**facts, "folder": str(output)}], [], [])).encode())
    if record:
        seconds = round(time.perf_counter() - began, 1)
        facts = {**figures, "seconds": seconds, "matrix": result.matrix[1:].tolist()}
        write_atomic(record, (json.dumps(facts, indent=1) + "\n").encode())
    command = "qtuning" if shutil.which("qtuning") else sys.argv[0]  # as `make demo` called it
    console.print(
        f"\nThe collection (prompts of all tasks, not the model) is in [bold]{output}[/bold]. "
        f"All of it took {time.perf_counter() - began:.0f} s.\n"
        f"A page with the whole story: [bold]{page}[/bold]. Try next:\n"
        f'  {command} predict {output} "the soup was fine, the bill was not" --task sentiment-restaurants\n'
        f"  {command} show {output}\n"
        f"  {command} learn {output} your-task.csv        [dim]# columns: text, label[/dim]\n"
        f"  {command} serve {output}                      [dim]# a page to try and teach tasks[/dim]",
        soft_wrap=True,
    )


def _check_output(output: Path, tasks: Sequence[str]) -> None:
    """An earlier demo may be overwritten; a collection with tasks of the user's may not."""
    check_target(output)
    if (output / MANIFEST).exists():
        own = [name for name in read_collection(output)[0].snapshots if name not in tasks]
        if own:
            raise CollectionError(
                f"{output} holds {own[0]!r}, which the demo did not teach; choose another folder with --output."
            )


def _learn(
    tuner: QTuner, tasks: list[Task], console: Console
) -> tuple[StreamRun, dict[str, Any], list[dict[str, Any]]]:
    """Run the stream; also what a record keeps of each task, and what each cost."""
    queue_size = tuner.method_settings.queue_size
    stored: dict[str, Any] = {}
    costs: list[dict[str, Any]] = []

    def after_task(task: Task, runs: Sequence[StreamRun]) -> None:
        state = runs[0].state
        score = runs[0].matrix[runs[0].done, runs[0].done - 1]
        evicted = " · trimmed by PCA" if state.learnt > queue_size else ""
        snapshot, queue = state.snapshots[task.name], state.queue
        rows = len(snapshot.rows)
        tensors = {
            "rows": snapshot.rows,
            "queue": queue.rows,
            "prompt": queue.rows[-queue.prompt_length :],
        }
        stored[task.name] = (tensors, {"facts": snapshot.facts})
        costs.append({"task": task.name, "seconds": runs[0].seconds[task.name], **memory()})
        console.print(
            f"  [green]✓[/green] {task.name:<22} test {score:6.1%}   {rows} prompt vectors[dim]{evicted}[/dim]"
        )

    with LearningBar(len(tasks), console) as bar:
        run = run_stream(
            tuner.method,
            tuner.backbone,
            tasks,
            tuner.train_settings,
            seed=tuner.seed,
            inner_rows=None,  # all, so that a column reads as one number all the way down
            report=bar,
            after_task=after_task,
        )
    return run, stored, costs


def _matrix_table(result: StreamRun) -> Table:
    """Scores after each task: read a column downwards to see whether a task was forgotten."""
    table = Table(
        title="\nScore on task 1, 2, … (column) after learning one more task (row), in %",
        title_justify="left",
        caption="a task that was forgotten would show a falling column",
    )
    table.add_column("after task")
    for number in range(1, len(result.tasks) + 1):
        table.add_column(str(number), justify="right")
    for i, name in enumerate(result.tasks, start=1):
        last = i == len(result.tasks)
        cells = [_cell(value, last or j == i - 1) for j, value in enumerate(result.matrix[i])]
        table.add_row(f"{i} {name}", *cells)
    return table


def _cell(value: float, bold: bool) -> Styled:
    if math.isnan(value):
        return Styled("·", style="dim")
    heat = int(np.clip((value - 0.4) / 0.6, 0, 1) * 255)
    return Styled(
        f"{100 * value:.1f}",
        style=f"{'bold ' if bold else ''}rgb({255 - heat},{heat // 2 + 110},90)",
    )


def _figures(tuner: QTuner, tasks: list[Task], result: StreamRun, before: str) -> dict[str, Any]:
    """Everything the summary says, with what a reader needs to judge it."""
    splits = [result.splits[name] for name in result.tasks]
    return {
        "command": f"qtuning demo --model {tuner.backbone.name} --seed {tuner.seed}",
        "backbone": {"name": tuner.backbone.name, "fingerprint": tuner.backbone.fingerprint()},
        "settings": settings_dict(tuner.method_settings, tuner.train_settings),
        "tasks": list(result.tasks),
        "split_sizes": {name: result.splits[name].sizes for name in result.tasks},
        "seed": tuner.seed,
        "versions": {"qtuning": __version__, "torch": torch.__version__, "transformers": version("transformers")},
        "average_score": average_score(result.matrix),
        "linear_probe": float(np.mean([_probe_score(tuner, task, result) for task in tasks])),
        "majority_class": float(np.mean([majority_share(split.test.labels) for split in splits])),
        "backward_transfer": backward_transfer(result.matrix),
        "tasks_unchanged": sum(result.unchanged.values()),
        "backbone_unchanged": weights_sha256(tuner.backbone) == before,
        "evictions": max(0, len(tasks) - tuner.method_settings.queue_size),
    }  # fmt: skip


def _summary_table(figures: dict[str, Any]) -> Table:
    rows = [
        ("average test score, Q-tuning", f"{figures['average_score']:.1%}"),
        ("  a linear probe on the same texts", f"{figures['linear_probe']:.1%}"),
        ("  always answering the commonest class", f"{figures['majority_class']:.1%}"),
        ("forgetting (backward transfer)", f"{figures['backward_transfer'] + 0.0:.1%}"),
        (
            "old tasks answered byte for byte as when learnt",
            f"{figures['tasks_unchanged']} of {len(figures['tasks'])}",
        ),
        ("model weights unchanged (sha256)", "yes" if figures["backbone_unchanged"] else "NO"),
        ("times the full queue made room", str(figures["evictions"])),
    ]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(name, f"[bold]{value}[/bold]")
    return table


def _probe_score(tuner: QTuner, task: Task, result: StreamRun) -> float:
    probe = make_method("linear-probe", tuner.backbone, tuner.method_settings, tuner.train_settings)
    split = result.splits[task.name]
    snapshot = probe.learn(probe.start(tuner.seed), task, split).snapshots[task.name]
    found = predict_log_probs(tuner.backbone, snapshot, split.test.texts).argmax(dim=-1)
    return score_predictions(task.metric, split.test.labels, found.tolist())


def _show_predictions(
    tuner: QTuner, tasks: list[Task], result: StreamRun, console: Console
) -> None:
    """One test text of each task, drawn at random: right or wrong, a person can judge."""
    texts, golds = [], []
    for task in tasks:
        rows = result.splits[task.name].test
        drawn = int(numpy_generator("demo-text", tuner.seed, task.name).integers(len(rows)))
        texts.append(rows.texts[drawn])
        golds.append(task.label_names[rows.labels[drawn]])
    found = tuner.predict_proba(texts, [task.name for task in tasks])
    assert isinstance(found, list)
    table = Table(
        title="\nOne unseen text of each task, drawn at random, all in one batch",
        title_justify="left",
    )
    for heading in ("text", "task", "answer", "truth"):
        table.add_column(heading)
    for text, task, probabilities, gold in zip(texts, tasks, found, golds, strict=True):
        label = max(probabilities, key=probabilities.__getitem__)
        colour = "green" if label == gold else "red"
        answer = f"[{colour}]{label}[/{colour}] {probabilities[label]:.0%}"
        table.add_row(str(text), task.name, answer, gold)
    console.print(table)
