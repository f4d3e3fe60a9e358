"""`qtuning demo`: one frozen model learns eight tasks, evicts from its queue, and forgets nothing."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text as Styled

from qtuning.backbones import weights_sha256
from qtuning.evaluation import average_score, backward_transfer, majority_share
from qtuning.methods import make_method
from qtuning.progress import LearningBar
from qtuning.stream_loop import StreamResult, run_stream
from qtuning.streams import get_stream, load_task
from qtuning.tasks import Task
from qtuning.tuner import QTuner

SETTINGS: dict[str, Any] = {
    "prompt_length": 5,
    "shared_length": 5,
    "queue_size": 4,
    "epochs": 12,
    "validate_every": 2,
}
"""Small, so that eight tasks fit a coffee break on two cores and the queue overflows four times."""

TRY = (
    ("The noodles were cold, but the waiter could not have been kinder.", "sentiment-restaurants"),
    ("I transferred the money on Monday and it still has not shown up.", "intent-bank"),
    ("You have been selected! Confirm your card number to release the parcel.", "spam"),
    ("The server room is filling with smoke and nobody picks up.", "urgency"),
    ("Could you close my contract at the end of the month?", "intent-telecom"),
    ("Oh brilliant, another meeting without an agenda. Well done.", "tone"),
)


def run_demo(
    output: Path, model: str = "minilm", seed: int = 0, console: Console | None = None
) -> None:
    """Learn the demo stream, show the score matrix, save the collection."""
    console = console or Console()
    stream = get_stream("demo")
    tasks = [load_task(name) for name in stream.tasks]
    began = time.perf_counter()
    console.print(
        f"[bold]One frozen model, {len(tasks)} tasks, 16 examples per class.[/bold] Loading {model} …"
    )
    tuner = QTuner(model, seed=seed, **SETTINGS)
    before = weights_sha256(tuner.backbone)
    result = _learn(tuner, tasks, console)
    tuner.state = result.state
    tuner._refresh()
    console.print(_matrix_table(result))
    _show_summary(tuner, tasks, result, before, console)
    _show_predictions(tuner, console)
    tuner.save_pretrained(output, overwrite=True)
    console.print(
        f"\nThe collection (prompts of all tasks, not the model) is in [bold]{output}[/bold]. "
        f"All of it took {time.perf_counter() - began:.0f} s. Try next:\n"
        f'  qtuning predict {output} "the soup was fine, the bill was not" --task sentiment-restaurants\n'
        f"  qtuning show {output}\n"
        f"  qtuning learn {output} your-task.csv        [dim]# columns: text, label[/dim]"
    )


def _learn(tuner: QTuner, tasks: list[Task], console: Console) -> StreamResult:
    queue_size = tuner.method_settings.queue_size

    def after_task(task: Task, state: Any, score: float) -> None:
        evicted = " · queue was full: trimmed by PCA" if state.learnt > queue_size else ""
        rows = len(state.snapshots[task.name].rows)
        console.print(
            f"  [green]✓[/green] {task.name:<22} test {score:6.1%}   {rows} prompt vectors[dim]{evicted}[/dim]"
        )

    with LearningBar(len(tasks), console) as bar:
        return run_stream(
            tuner._method,
            tuner.backbone,
            tasks,
            tuner.train_settings,
            seed=tuner.seed,
            report=bar,
            after_task=after_task,
        )


def _matrix_table(result: StreamResult) -> Table:
    """Scores after each task: read a column downwards to see whether a task was forgotten."""
    table = Table(
        title="\nScore on each task (column) after learning one more (row), in %",
        title_justify="left",
    )
    table.add_column("after")
    for name in result.tasks:
        table.add_column("\n".join(name.split("-")), justify="right", vertical="bottom")
    for i, name in enumerate(result.tasks, start=1):
        last = i == len(result.tasks)
        table.add_row(
            name,
            *(_cell(value, bold=last or j == i - 1) for j, value in enumerate(result.matrix[i])),
        )
    table.caption = "bold: all test rows; others: the same 64 rows each time"
    return table


def _cell(value: float, bold: bool) -> Styled:
    if math.isnan(value):
        return Styled("·", style="dim")
    heat = int(np.clip((value - 0.4) / 0.6, 0, 1) * 255)
    return Styled(
        f"{100 * value:.1f}",
        style=f"{'bold ' if bold else ''}rgb({255 - heat},{heat // 2 + 110},90)",
    )


def _show_summary(
    tuner: QTuner, tasks: list[Task], result: StreamResult, before: str, console: Console
) -> None:
    with console.status("a linear probe on the same texts …"):
        probe = make_method(
            "linear-probe", tuner.backbone, tuner.method_settings, tuner.train_settings
        )
        probed = run_stream(probe, tuner.backbone, tasks, tuner.train_settings, seed=tuner.seed)
    majority = np.mean([majority_share(result.splits[name].test.labels) for name in result.tasks])
    same = sum(result.unchanged.values())
    frozen = weights_sha256(tuner.backbone) == before
    evictions = max(0, len(tasks) - tuner.method_settings.queue_size)
    rows = [
        ("average test score, Q-tuning", f"{average_score(result.matrix):.1%}"),
        ("  a linear probe on the same texts", f"{average_score(probed.matrix):.1%}"),
        ("  always answering the commonest class", f"{majority:.1%}"),
        ("forgetting (backward transfer)", f"{backward_transfer(result.matrix) + 0.0:.1%}"),
        ("old tasks answered byte for byte as when learnt", f"{same} of {len(tasks)}"),
        ("model weights unchanged (sha256)", "yes" if frozen else "NO"),
        ("times the full queue made room", str(evictions)),
    ]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(name, f"[bold]{value}[/bold]")
    console.print(table)


def _show_predictions(tuner: QTuner, console: Console) -> None:
    texts, names = [text for text, _ in TRY], [name for _, name in TRY]
    probabilities = tuner.predict_proba(list(texts), names)
    assert isinstance(probabilities, list)
    table = Table(
        title="\nA few texts it has never seen, all tasks in one batch", title_justify="left"
    )
    for heading in ("text", "task", "answer"):
        table.add_column(heading)
    for text, name, found in zip(texts, names, probabilities, strict=True):
        label = max(found, key=found.__getitem__)
        table.add_row(text, name, f"[bold]{label}[/bold] {found[label]:.0%}")
    console.print(table)
