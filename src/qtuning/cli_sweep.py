"""The command that runs a grid of runs. Registered in `cli.py`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from qtuning.cli_runs import counted, parse_seeds, parse_settings, whole
from qtuning.errors import ConfigError
from qtuning.streams import read_yaml

if TYPE_CHECKING:
    from qtuning.sweep import Outcome, Pack


def sweep(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="YAMLs of sweeps, taken as one; flags below override them."),
    ] = None,
    stream: Annotated[
        str | None, typer.Option(help="One or several, e.g. 'demo starter-four'.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="One or several, e.g. 'q-tuning ewc'; q-tuning by default.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="One or several short names, hub ids or folders.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Of every pack, e.g. '0 1 2'.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="One or several; {method} stands for the method's name.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="A setting with several values, e.g. queue_size=5,10."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of all, e.g. epochs=30.")
    ] = None,
    shots: Annotated[
        int | None, typer.Option(help="Training examples per class; 0 for all.")
    ] = None,
    test_limit: Annotated[str | None, typer.Option(help="Test rows per class, or 'all'.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder of Parquet files; QTUNING_DATA by default.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where the records lie.")] = Path("runs"),
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; a GPU if there is one.")] = None,
    compile: Annotated[str, typer.Option(help="On a GPU: auto, on, dynamic, off.")] = "auto",
    lanes: Annotated[
        int | None, typer.Option(help="Seeds that share a pass; as many as fit by default.")
    ] = None,
    together: Annotated[
        bool | None,
        typer.Option(
            "--together/--apart",
            help="Methods, settings and streams of as many tasks share packs, which pays on a GPU; apart by default.",
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Packs side by side on Ray, begun again if one dies.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(help="With --ray: a running cluster; this machine by default."),
    ] = None,
    cpus_per_pack: Annotated[
        int | None, typer.Option(min=1, help="Threads of a pack; with --ray its cores too.")
    ] = None,
    gpus_per_pack: Annotated[
        float | None, typer.Option(min=0, help="With --ray: GPUs of a pack, e.g. 0.5.")
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="With --ray: new tries of a pack whose worker died.")
    ] = 3,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the packs; learn nothing.")
    ] = False,
) -> None:
    """Run every combination of methods, streams, models and settings; the same command again goes on.

    Seeds of one combination are a pack and share every pass of the model. A pack that fails does not stop the others;
    the exit code is then 1.

    Examples:
        `qtuning sweep --stream demo --method "q-tuning per-task-prompt" --seeds "0 1 2"`

        `qtuning sweep --stream demo --vary queue_size=5,10 --vary prompt_lr=0.003,0.01 --dry-run`

        `qtuning sweep examples/sweep.yaml --ray --cpus-per-pack 2`

        `qtuning sweep --stream "order-08 order-09 order-10" --together --data DIR --dry-run`

        `qtuning sweep tables/long-smollm2.yaml tables/eviction-smollm2.yaml --data DIR --dry-run`
    """
    from qtuning.sweep import Place, expand, joined, override, read_sweep, run_here, run_on_ray

    names = {"streams": stream, "methods": method, "models": model, "presets": preset}
    own: dict[str, Any] = {key: _names(text) for key, text in names.items() if text is not None}
    if seeds is not None:
        own["seeds"] = parse_seeds(seeds)
    if test_limit is not None:
        own["test_limit"] = 0 if test_limit == "all" else whole(test_limit, "--test-limit")
    if together is not None:
        own["together"] = together
    chosen = {} if shots is None else {"shots": shots}
    own |= {"settings": chosen | parse_settings(settings or []), "vary": _varied(vary or [])}
    grids = {str(file): read_yaml(file) for file in files or ()} or {"the flags": {}}
    whole_sweep = joined(
        [read_sweep(override(raw, own, name), name) for name, raw in grids.items()]
    )
    if not ray and (address is not None or gpus_per_pack is not None):
        flag = "--gpus-per-pack" if address is None else "--address"
        raise ConfigError(f"{flag} is for Ray; add --ray, or leave it out.")
    packs = expand(whole_sweep)
    if dry_run:
        _print_packs(packs, output)
        return
    place = Place(output, data, device, compile, lanes, cpus_per_pack)
    with _Display(len(packs), ray) as display:
        if ray:
            found = run_on_ray(
                packs,
                place,
                display.after,
                address=address,
                cpus=cpus_per_pack,
                gpus=gpus_per_pack,
                retries=retries,
            )
        else:
            found = run_here(packs, place, display.after, display.bar)
    _print_outcomes(found, output)
    if any(each.error for each in found):
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _varied(pairs: Sequence[str]) -> dict[str, list[str]]:
    """`name=v1,v2` pairs; a section before a dot is allowed and ignored, as in --set."""
    found: dict[str, list[str]] = {}
    for pair in pairs:
        name, equals, values = pair.partition("=")
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not listed:
            raise ConfigError(f"--vary takes name=value,value, got {pair!r}.")
        key = name.strip().split(".")[-1]
        if key in found:
            raise ConfigError(f"--vary names {key} twice; list all its values after one.")
        found[key] = listed
    return found


def _print_packs(packs: Sequence[Pack], output: Path) -> None:
    """What would be run, and what is there already."""
    from qtuning.runs import run_folder

    console, table = Console(), Table("pack", "seeds", "finished", "records")
    there = 0
    for pack in packs:
        for member in pack.members:
            folders = [run_folder(output, member.config, seed) for seed in member.seeds]
            done = sum((folder / "result.json").exists() for folder in folders)
            there += done
            seeds = " ".join(map(str, member.seeds))
            table.add_row(member.name, seeds, f"{done} of {len(folders)}", f"{folders[0]}")
        if pack is not packs[-1]:
            table.add_section()
    console.print(table)
    runs = sum(len(pack.runs) for pack in packs)
    said = f"{counted(len(packs), 'pack')}, {counted(runs, 'run')}, {there} of them finished"
    console.print(said, highlight=False)


class _Display:
    """A line for every pack that ended, above how far the one under way is, or on Ray how many have ended."""

    def __init__(self, packs: int, on_ray: bool):
        from qtuning.progress import LearningBar

        self.console, self.packs, self.ended = Console(stderr=True), packs, 0
        self.bar = LearningBar(console=self.console)
        self.waiting = self.console.status(f"0 of {counted(packs, 'pack')} ended")
        self.shown: AbstractContextManager[Any] = self.waiting if on_ray else self.bar

    def __enter__(self) -> _Display:
        self.shown.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.shown.__exit__(*error)

    def after(self, outcome: Outcome) -> None:
        """Count one more."""
        self.ended += 1
        self.waiting.update(f"{self.ended} of {counted(self.packs, 'pack')} ended")
        mark = "[red]✗[/red]" if outcome.error else "[green]✓[/green]"
        self.console.print(
            f"{mark} pack {self.ended} of {self.packs}: {outcome.pack.name}", highlight=False
        )


def _print_outcomes(found: Sequence[Outcome], output: Path) -> None:
    console, table = Console(), Table("pack", "seeds", "average", "seconds")
    finished = [each for each in found if not each.error]
    failed = [each for each in found if each.error]
    for each in finished:
        scores = iter(each.scores)
        for i, member in enumerate(each.pack.members):
            count = len(member.seeds)
            mean = sum(islice(scores, count)) / count
            seconds = "" if i else f"{each.seconds:.0f}"
            table.add_row(member.name, str(count), f"{mean:.1%}", seconds)
    if finished:
        console.print(table)
    for each in failed:
        typer.echo(f"failed: {each.pack.name}: {each.error}")
    typer.echo(f"{counted(len(finished), 'pack')} finished, {len(failed)} failed")
    if failed:
        typer.echo("the same command again tries the failed ones only")
    if finished:
        typer.echo(f"compare them: qtuning report {shlex.quote(str(output))} -o report.html")
