"""The commands of researchers: run a stream, validate a file, report and sum up records. Registered in `cli.py`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from qtuning.errors import ConfigError
from qtuning.streams import read_card, read_stream, read_yaml
from qtuning.trackers import Tracker, epoch_values, make_tracker

SHOWN = ("auto", "quiet", "json")


def run(
    config: Annotated[
        Path | None, typer.Argument(help="A YAML of a run; flags below override it.")
    ] = None,
    stream: Annotated[
        str | None, typer.Option(help="A stream, see `qtuning ls streams`, or a YAML file.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="See `qtuning ls methods`.")] = None,
    model: Annotated[str | None, typer.Option(help="Short name, hub id or folder.")] = None,
    shots: Annotated[
        int | None, typer.Option(help="Training examples per class; 0 for all.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="One or several, e.g. '0 1 2' or '0,1,2'.")] = "0",
    protocol: Annotated[
        str | None,
        typer.Option(help="given, progprompt, paper or tuning; the stream's own by default."),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="See `qtuning ls presets`.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Positions of prompt, text and answer; the model's, or 512.")
    ] = None,
    readout: Annotated[
        str | None, typer.Option(help="What an encoder's head reads: mean, cls or peft.")
    ] = None,
    test_limit: Annotated[str | None, typer.Option(help="Test rows per class, or 'all'.")] = None,
    inner_rows: Annotated[
        int | None,
        typer.Option(
            help="Test rows of a task between its learning and the end; 0 asks none.", min=0
        ),
    ] = None,
    evaluate_with: Annotated[
        str | None, typer.Option(help="snapshot, or a diagnostic: shared, current.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting, e.g. train.epochs=30 or queue_size=5."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder of Parquet files; QTUNING_DATA by default.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where the records lie.")] = Path("runs"),
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; a GPU if there is one.")] = None,
    compile: Annotated[
        str, typer.Option(help="On a GPU: auto (when the work ahead repays it), on, dynamic, off.")
    ] = "auto",
    lanes: Annotated[
        int | None, typer.Option(help="Seeds that share a pass; as many as fit by default.")
    ] = None,
    show: Annotated[
        str, typer.Option(help="auto (live), quiet, or json (a line per event).")
    ] = "auto",
    log_with: Annotated[
        str | None, typer.Option(help="Also log to tensorboard or trackio.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and an estimate; learn nothing.")
    ] = False,
) -> None:
    """Run a method on a stream; the same command again goes on where it was stopped.

    Examples:
        `qtuning run --stream demo --method q-tuning --seeds "0 1 2"`

        `qtuning run --stream order-09 --shots 20 --model minilm --preset minilm --data DIR --dry-run`
    """
    from qtuning.runs import RunConfig, read_run_config
    from qtuning.runs import run as run_config

    flags: dict[str, Any] = {
        "stream": stream, "method": method, "model": model, "protocol": protocol, "preset": preset,
        "dtype": dtype, "evaluate_with": evaluate_with, "max_length": max_length, "readout": readout,
        "inner_rows": inner_rows,
    }  # fmt: skip
    raw = read_yaml(config) if config else {}
    raw |= {key: value for key, value in flags.items() if value is not None}
    if test_limit is not None:
        raw["test_limit"] = 0 if test_limit == "all" else whole(test_limit, "--test-limit")
    chosen = dict(raw.get("settings") or {})
    if shots is not None:
        chosen["shots"] = shots
    raw["settings"] = chosen | parse_settings(settings or [])
    if show not in SHOWN:
        raise ConfigError(f"--show must be one of {', '.join(SHOWN)}, got {show!r}.")
    wanted: RunConfig = read_run_config(raw, str(config or "the flags")).resolved()
    numbers = parse_seeds(seeds)
    if dry_run:
        how = {"device": device, "compile": compile, "lanes": lanes}
        _print_plan(wanted, numbers, data, how, output)
        return
    tracker = make_tracker(log_with, output, asdict(wanted)) if log_with else None
    display = _Display(show, wanted, numbers, tracker)
    with display:
        found = run_config(
            wanted,
            numbers,
            output,
            data=data,
            device=device,
            compile=compile,
            lanes=lanes,
            report=display.epoch,
            after_task=display.task,
            started=display.started,
        )
    display.results(found, output)


def validate(
    files: Annotated[
        list[Path], typer.Argument(help="YAML files: streams, data set cards, runs or sweeps.")
    ],
) -> None:
    """Check YAML files of streams, data sets, runs and sweeps.

    Example: `qtuning validate my-stream.yaml`
    """
    from qtuning.runs import read_run_config
    from qtuning.sweep import expand, read_sweep

    for file in files:
        raw = read_yaml(file)
        if "tasks" in raw:
            found = read_stream(raw, file.name)
            said = f"stream {found.name!r} with {counted(len(found.tasks), 'task')}"
        elif "labels" in raw:
            card = read_card(raw, file.name)
            said = f"data set {card.name!r} with {len(card.labels)} labels"
        elif "streams" in raw or "parts" in raw:
            packs = expand(read_sweep(raw, file.name))
            runs = sum(len(pack.runs) for pack in packs)
            said = f"sweep of {counted(len(packs), 'pack')}, {counted(runs, 'run')}"
        else:
            config = read_run_config(raw, file.name).resolved()
            said = f"run of {config.method!r} on {config.stream!r}, hash {config.short_hash()}"
        typer.echo(f"{file}: fine, {said}")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of records, or result files.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="HTML, .md, .tex or .csv by its ending.")
    ] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="Also save figures to this folder.")] = None,
    figure_type: Annotated[str, typer.Option(help="png or svg.")] = "png",
) -> None:
    """Make one page of records, finished or not; it opens offline.

    Examples:
        `qtuning report runs -o report.html`

        `qtuning report runs/order-09 -o table.tex --figures figures --figure-type svg`
    """
    from qtuning.files import write_atomic
    from qtuning.report.export import save_figures, to_csv, to_latex, to_markdown
    from qtuning.report.gather import gather
    from qtuning.report.page import render_page
    from qtuning.report.tables import group_runs

    writers = {".md": to_markdown, ".tex": to_latex, ".csv": to_csv}
    if output.suffix not in {".html", *writers}:
        raise ConfigError(f"--output must end in .html, .md, .tex or .csv, got {output.name!r}.")
    if figure_type not in ("png", "svg"):
        raise ConfigError(f"--figure-type must be png or svg, got {figure_type!r}.")
    records = gather(runs)
    groups = group_runs(records.results)
    text = render_page(records) if output.suffix == ".html" else writers[output.suffix](groups)
    write_atomic(output, text.encode())
    typer.echo(
        f"{output}: {len(records.results)} finished runs, {len(records.unfinished)} unfinished"
    )
    for problem in records.unreadable:
        typer.echo(f"not readable: {problem}", err=True)
    if figures is not None:
        for path in save_figures(groups, figures, figure_type):
            typer.echo(str(path))


def summary(
    runs: Annotated[list[Path], typer.Argument(help="Folders of records, or result files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON file to write.")] = Path(
        "summary.json"
    ),
) -> None:
    """Sum up the records of orders 8 to 13 in one JSON: means over seeds, paired differences, conditions.

    Examples:
        `qtuning summary results -o results/summary.json`

        `qtuning summary runs/order-08 runs/order-09 runs/order-10`
    """
    from qtuning.records import write_json
    from qtuning.report.gather import gather
    from qtuning.summary import summarise

    if output.suffix != ".json":
        raise ConfigError(f"--output must end in .json, got {output.name!r}.")
    records = gather(runs)
    found = summarise(records.results)
    write_json(output, found)
    for section in ("long_sequence", "lifelong"):
        if found[section]:
            Console().print(_summary_table(section.replace("_", " "), found[section]))
    typer.echo(f"{output}: {len(records.results)} finished runs read")
    for problem in records.unreadable:
        typer.echo(f"not readable: {problem}", err=True)


def _summary_table(title: str, section: dict[str, Any]) -> Table:
    """One row per label, the best average of each backbone first, with a column for every order that has a figure."""
    every = [facts for labels in section.values() for facts in labels.values()]
    orders = sorted({order for facts in every for order in facts["orders"]})
    headings = [*(order.removeprefix("order-") for order in orders), "average"]
    if any(facts.get("minus_length_matched") for facts in every):
        headings.append("− control")
    table = Table("method", title=f"{title}: average score, %")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for backbone, labels in section.items():
        table.add_section()
        table.add_row(f"[bold]{backbone}[/bold]")
        averages = {
            label: (facts["average"] or {}).get("mean", 0) for label, facts in labels.items()
        }
        for label in sorted(labels, key=lambda each: (-averages[each], each)):
            facts = labels[label]
            row = [
                f"{100 * facts['orders'][o]['mean']:.1f}" if o in facts["orders"] else ""
                for o in orders
            ]
            row.append(f"{100 * averages[label]:.1f}" if averages[label] else "")
            if minus := facts.get("minus_length_matched"):
                p = "" if minus["p"] is None else f" p {minus['p']:.2f}"
                row.append(f"{100 * minus['mean']:+.1f}{p}")
            table.add_row(f"  {label}", *row)
    return table


def counted(count: int, thing: str) -> str:
    """`1 task`, `2 tasks`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """`name=value` pairs; a section before a dot (`train.epochs`) is allowed and ignored."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set takes name=value, got {pair!r}.")
        found[name.strip().split(".")[-1]] = value.strip()
    return found


def parse_seeds(text: str) -> list[int]:
    """Whole numbers, separated by spaces or commas."""
    seeds = [whole(word, "--seeds") for word in text.replace(",", " ").split()]
    if not seeds or len(set(seeds)) != len(seeds):
        raise ConfigError(f"--seeds must be one or several different whole numbers, got {text!r}.")
    return seeds


def whole(text: str, flag: str) -> int:
    """A whole number of the command line."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{flag} must be a whole number, got {text!r}.") from None


def _print_plan(
    config: Any, seeds: Sequence[int], data: str | None, how: dict[str, Any], output: Path
) -> None:
    """What would be run, with sizes, and an estimate from a few real training steps."""
    from qtuning.estimate import estimate
    from qtuning.runs import run_folder

    plan = estimate(config, seeds, data, how)
    console = Console()
    console.print(
        f"[bold]{config.method}[/bold] on [bold]{config.stream}[/bold], {config.model}, seeds {list(seeds)}"
    )
    table = Table("task", "classes", "train", "validation", "test", "steps")
    for row in plan["tasks"]:
        table.add_row(
            *(str(row[key]) for key in ("name", "classes", "train", "validation", "test", "steps"))
        )
    console.print(table)
    for seed in seeds:
        console.print(f"record: {run_folder(output, config, seed)}")
    console.print(
        f"one step of {counted(len(seeds), 'lane')} takes {plan['step_seconds']:.3f} s here; about "
        f"{plan['seconds'] / 60:.0f} minutes for all, and {plan['memory_mib']:.0f} MiB of memory."
    )


class _Display:
    """Progress for people, silence, or a JSON line per event."""

    def __init__(
        self,
        show: str,
        config: Any,
        seeds: Sequence[int],
        tracker: Tracker | None = None,
    ):
        from qtuning.progress import LearningBar

        self.show, self.config, self.seeds, self.tracker = show, config, list(seeds), tracker
        self.console = Console(stderr=show == "json", quiet=show == "quiet")
        self.bar = LearningBar(console=self.console, quiet=show != "auto")
        self.began = time.perf_counter()

    def __enter__(self) -> _Display:
        self.bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)
        if self.tracker:
            self.tracker.close()

    def started(self, backbone: Any, runs: Sequence[Any]) -> None:
        self.bar.started(backbone, runs)
        tasks = runs[0].tasks
        if self.show == "json":
            self._line(
                {
                    "event": "start",
                    "tasks": list(tasks),
                    "backbone": backbone.name,
                }
            )
        elif self.show == "auto":
            self.console.print(
                f"{self.config.method} on {self.config.stream}: {len(tasks)} tasks, seeds {self.seeds}, "
                f"{backbone.name} on {backbone.device}"
            )

    def epoch(self, now: Any) -> None:
        self.bar(now)
        if self.tracker:
            self.tracker.log(epoch_values(now), now.epoch)
        if self.show == "json":
            self._line({"event": "epoch", **asdict(now)})

    def task(self, task: Any, runs: Sequence[Any]) -> None:
        scores = [run.matrix[run.done, run.done - 1] for run in runs]
        if self.show == "json":
            known = [None if math.isnan(score) else score for score in scores]
            self._line({"event": "task", "task": task.name, "scores": known, "done": runs[0].done})
        elif self.show == "auto":
            mean = sum(scores) / len(scores)
            said = "     –" if math.isnan(mean) else f"{mean:6.1%}"
            sizes = runs[0].splits[task.name].sizes
            self.console.print(
                f"  [green]✓[/green] {runs[0].done:>2} {task.name:<22} {said}  "
                f"[dim]{sizes['train']}/{sizes['validation']}/{sizes['test']} texts[/dim]",
                highlight=False,
            )

    def results(self, found: Sequence[dict[str, Any]], output: Path) -> None:
        from qtuning.runs import run_folder

        for result in found:
            folder = run_folder(output, self.config, result["seed"])
            if self.show == "json":
                keys = ("seed", "average_score", "backward_transfer", "forward_transfer")
                self._line(
                    {"event": "result", "folder": str(folder), **{k: result[k] for k in keys}}
                )
            else:
                transfer = result["backward_transfer"]
                said = "not measured" if transfer is None else f"{transfer + 0.0:+.1%}"
                typer.echo(
                    f"seed {result['seed']}: average {result['average_score']:.1%}, "
                    f"backward transfer {said}  {folder}"
                )

    def _line(self, event: dict[str, Any]) -> None:
        typer.echo(json.dumps({"seconds": round(time.perf_counter() - self.began, 2), **event}))
