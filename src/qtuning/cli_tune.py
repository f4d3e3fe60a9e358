"""The command that chooses hyper-parameters. Registered in `cli.py`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from qtuning.cli_runs import parse_seeds, parse_settings


def tune(
    method: Annotated[str, typer.Option(help="See `qtuning ls methods`.")],
    model: Annotated[str, typer.Option(help="Short name, hub id or folder.")] = "minilm",
    streams: Annotated[
        str, typer.Option(help="One or several that you will not report, e.g. 'tuning'.")
    ] = "tuning",
    seeds: Annotated[str, typer.Option(help="One or several, e.g. '0 1 2'.")] = "0 1",
    shots: Annotated[int | None, typer.Option(help="Training examples per class.")] = None,
    preset: Annotated[str | None, typer.Option(help="What the grid starts from.")] = None,
    test_limit: Annotated[int, typer.Option(help="Test rows per class; 0 for all.")] = 50,
    max_length: Annotated[
        int | None, typer.Option(help="Positions of prompt, text and answer; the model's, or 512.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting for all candidates.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder of Parquet files; QTUNING_DATA by default.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    records: Annotated[Path, typer.Option(help="Where the records lie.")] = Path("runs/tuning"),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The preset; METHOD-MODEL.yaml.")
    ] = None,
) -> None:
    """Try a method's grid on streams set aside for it, and write the best settings as a preset.

    Examples:
        `qtuning tune --method q-tuning --model minilm`

        `qtuning tune --method ewc --seeds "0 1 2" -o ewc.yaml`

        `qtuning run --stream demo --method ewc --preset ewc.yaml`
    """
    from qtuning.backbones import load_backbone
    from qtuning.progress import LearningBar
    from qtuning.runs import RunConfig
    from qtuning.tuning import Tried, start_of, write_preset
    from qtuning.tuning import tune as run_tune

    start = start_of(preset, method) if preset else {}
    chosen = {**start, **parse_settings(settings or [])}
    if shots is not None:
        chosen["shots"] = shots
    names, numbers = streams.replace(",", " ").split(), parse_seeds(seeds)
    base = RunConfig(
        stream=names[0],
        method=method,
        model=model,
        max_length=max_length,
        dtype=dtype,
        test_limit=test_limit,
        settings=chosen,
    ).resolved()
    console = Console()
    bar = LearningBar(console=console)

    def said(tried: Tried) -> None:
        own = ", ".join(f"{name} {value:g}" for name, value in tried.settings.items())
        console.print(f"  {tried.score:6.1%}  {own or 'nothing to tune'}", highlight=False)

    family = load_backbone(model, device="cpu").family
    console.print(f"{method} on {' and '.join(names)}, {model}, seeds {numbers}")
    with bar:
        tried = run_tune(
            base,
            names,
            numbers,
            family,
            records,
            said,
            data=data,
            device=device,
            report=bar,
            started=bar.started,
        )
    path = output or Path(f"{method}-{Path(model).name}.yaml")
    command = shlex.join(["qtuning", *sys.argv[1:]])
    write_preset(path, base, tried, f"chosen on {' and '.join(names)} by `{command}`")
    table = Table("mean", "each", "settings")
    for each in tried:
        table.add_row(
            f"{each.score:.1%}", " ".join(f"{s:.1%}" for s in each.scores), str(each.settings)
        )
    console.print(table)
    console.print(f"best settings: {path}")
