"""The command line. Every error is one line that names the value and the remedy; exit code 2."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from qtuning.cli_export import export
from qtuning.cli_runs import counted, parse_settings, report, run, summary, validate
from qtuning.cli_serve import serve
from qtuning.cli_sweep import sweep
from qtuning.cli_tune import tune
from qtuning.errors import CollectionError, ConfigError, QTuningError, TaskError, unknown

if TYPE_CHECKING:
    from qtuning.tuner import QTuner

app = typer.Typer(
    help="Continual few-shot learning on one frozen language model (Q-tuning, arXiv 2404.14607).",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# typer does not name this class and has moved it between versions
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
KINDS = ("methods", "models", "evictions", "streams", "datasets", "tasks", "presets", "protocols")

Collection = Annotated[Path, typer.Argument(help="Folder of the collection.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, …; a GPU if there is one.")]


def main() -> None:
    """Entry point of the `qtuning` command."""
    debug = "--debug" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--debug"] or ["--help"]
    try:
        sys.exit(app(words, prog_name="qtuning", standalone_mode=False) or 0)
    except UsageError as error:
        _fail(_usage(error, words))
    except (QTuningError, OSError) as error:
        if debug:
            raise
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("stopped", err=True)
        sys.exit(130)


def _usage(error: Any, words: list[str]) -> str:
    """Typer's own complaint in one line, with the value it does not name."""
    message = error.format_message().strip().rstrip(".")
    option = re.search(r"Invalid value for '(--[\w-]+)'", message)
    if option and option[1] in words[:-1]:
        message += f", got {words[words.index(option[1]) + 1]!r}"
    message += "" if message.endswith("?") else "."
    return f"{message} Try '{error.ctx.command_path if error.ctx else 'qtuning'} -h'."


def _fail(message: str) -> NoReturn:
    typer.echo("error: " + re.sub(r"\s*\n\s*", " ", message), err=True)
    sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        from qtuning import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where the collection is saved.")] = Path(
        "demo-collection"
    ),
    model: Annotated[
        str, typer.Option(help="An encoder: minilm, bge-small, a folder or hub id.")
    ] = "minilm",
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    record: Annotated[
        Path | None, typer.Option(help="Write the figures to this JSON file.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Save what is shown as an SVG file.")] = None,
) -> None:
    """Watch one frozen model learn eight tasks and forget none; a few minutes on two cores.

    Example: `qtuning demo --output my-first-collection`
    """
    from qtuning.demo import run_demo

    console = Console(record=True, width=96) if picture else Console()
    run_demo(output, model, seed, console, record)
    if picture:
        drawn = console.export_svg(title="qtuning demo")
        picture.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.S), encoding="utf-8")


@app.command()
def learn(
    collection: Collection,
    file: Annotated[
        Path, typer.Argument(help="CSV, TSV, JSONL or Parquet with a text and a label column.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Backbone of a new collection; minilm by default.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the task; the file's by default.")
    ] = None,
    text: Annotated[str, typer.Option(help="Column of the text.")] = "text",
    text_b: Annotated[str | None, typer.Option(help="Column of a second text.")] = None,
    label: Annotated[str, typer.Option(help="Column of the label.")] = "label",
    split: Annotated[
        str | None, typer.Option(help="Column that says train, validation or test.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Method of a new collection; q-tuning by default.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of a new collection; 0 by default.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32 (default) or bf16, for a new collection.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Settings of a new collection; see `qtuning ls presets`.")
    ] = None,
    readout: Annotated[
        str | None,
        typer.Option(help="Of a new collection on an encoder: mean (default), cls or peft."),
    ] = None,
    device: Device = None,
    replace: Annotated[
        bool, typer.Option(help="Learn a new version of a task of that name.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of a new collection, e.g. queue_size=5."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Teach a collection one more task; the collection is made if it is not there yet.

    Examples:
    `qtuning learn support refunds.csv --model minilm --set queue_size=5`

    `qtuning learn support tone.jsonl --text message --label verdict`

    `qtuning learn support tone.jsonl --model smollm2-135m --preset smollm2 --method q-tuning-plus`
    """
    from qtuning.collection import MANIFEST, check_target
    from qtuning.config import make_settings
    from qtuning.task_files import read_task
    from qtuning.tuner import QTuner

    task = read_task(file, name, text=text, text_b=text_b, label=label, split=split)
    given: dict[str, Any] = {
        "model": model, "method": method, "seed": seed, "dtype": dtype, "readout": readout, "preset": preset
    }  # fmt: skip
    given = {key: value for key, value in given.items() if value is not None}
    chosen = parse_settings(settings or [])
    make_settings(**chosen)
    if (collection / MANIFEST).exists():
        if given or chosen:
            flag = "--set" if chosen else f"--{next(iter(given))}"
            raise ConfigError(
                f"{flag} is for a new collection, and {collection} has its own already; leave it out."
            )
        tuner = QTuner.from_pretrained(collection, device=device)
    else:
        check_target(collection)
        tuner = QTuner(**given, device=device, **chosen)
    facts = tuner.learn(task, replace=replace)
    try:
        tuner.save_pretrained(collection)
    except CollectionError:  # others saved while this was learnt
        tuner = _join(tuner, collection, task.name, replace)
        note = "the collection was changed meanwhile: the task joined it, but later tasks do not build on it"
        facts = {**facts, "version": tuner.version(task.name), "notes": [*facts["notes"], note]}
    if as_json:
        _print_json(facts)
        return
    console = Console()
    for note in facts["notes"]:
        console.print(f"note: {note}", style="yellow", highlight=False)
    sizes = facts["split"]
    console.print(
        f"learnt [bold]{task.name}[/bold] from {sizes['train']} texts in {facts['seconds']:.0f} s: "
        f"validation {_percent(facts.get('validation_score'))} ({sizes['validation']} texts), "
        f"test {_percent(facts['test_score'])} ({sizes['test']} texts). "
        f"{collection} now knows {counted(len(tuner.tasks), 'task')}."
    )


@app.command()
def predict(
    collection: Collection,
    texts: Annotated[list[str] | None, typer.Argument(help="One or more texts.")] = None,
    task: Annotated[
        str | None, typer.Option(help="Which task; found by the text if left out.")
    ] = None,
    text_b: Annotated[
        str | None,
        typer.Option(help="The second text, for a task on pairs; its column in a table."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="A CSV, TSV, JSONL or Parquet, or any file with one text per line."),
    ] = None,
    text: Annotated[str, typer.Option(help="Column of the text, in a table.")] = "text",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the rows and their answers to a .jsonl or .csv."
        ),
    ] = None,
    device: Device = None,
    ray: Annotated[bool, typer.Option("--ray", help="Spread a large file over Ray.")] = False,
    address: Annotated[
        str | None, typer.Option(help="With --ray: a running cluster; this machine by default.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With --ray: open collections at most.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Label texts with a task of a collection, or find the task first.

    Examples:
    `qtuning predict support "Where is my money?" --task refunds`

    `qtuning predict support "Where is my money?"`

    `qtuning predict support --file inbox.txt --task tone --json`

    `qtuning predict support --file inbox.parquet --text body --task tone -o labelled.jsonl --ray`
    """
    from qtuning.labelling import (
        Asked,
        answers,
        check_output,
        label_file,
        label_on_ray,
        to_json,
        write_rows,
    )
    from qtuning.tuner import QTuner

    if output is not None:
        check_output(output)
    if file is not None and texts:
        raise TaskError("give texts or a file of texts with --file, not both.")
    if ray and file is None:
        raise TaskError("--ray is for files; name one with --file, or leave --ray out.")
    if not ray and (address is not None or workers is not None):
        flag = "--workers" if address is None else "--address"
        raise ConfigError(f"{flag} is for Ray; add --ray, or leave it out.")
    found: Iterable[dict[str, Any]]
    if file is not None:
        asked = Asked(file, task, text, text_b)
        if ray:
            found = label_on_ray(collection, asked, device=device, address=address, workers=workers)
        else:
            asked.check()
            found = label_file(QTuner.from_pretrained(collection, device=device), asked)
        column = asked.shown
    elif texts:
        rows: list[Any] = [(row, text_b) for row in texts] if text_b is not None else texts
        answered = answers(QTuner.from_pretrained(collection, device=device), rows, task)
        found = ({"text": row, **said} for row, said in zip(rows, answered, strict=True))
        column = "text"
    else:
        raise TaskError("give at least one text, or a file of texts with --file.")
    if output is not None:
        typer.echo(f"{output}: {write_rows(found, output)} rows")
        return
    for said in found:
        if as_json:
            typer.echo(to_json(said))
            continue
        shown = " / ".join(said[column]) if isinstance(said[column], tuple) else said[column]
        where = f"{said['task'] or '-'} {said['similarity']:.2f}\t" if "similarity" in said else ""
        share = said["probabilities"].get(said["label"], 0.0)
        typer.echo(f"{where}{said['label']}\t{share:.3f}\t{shown}")


app.command()(run)
app.command()(serve)
app.command()(sweep)
app.command()(tune)
app.command()(report)
app.command()(summary)
app.command()(export)
app.command()(validate)


@app.command("ls")
def list_known(
    kind: Annotated[
        str | None, typer.Argument(help=f"One of: {', '.join(KINDS)}; all kinds by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what is registered, with one line each.

    Example: `qtuning ls methods --json`
    """
    if kind is None:
        counts = {name: len(_entries(name)) for name in KINDS}
        if as_json:
            _print_json(counts)
            return
        for name, count in counts.items():
            typer.echo(f"{count:>4}  qtuning ls {name}")
        return
    if kind not in KINDS:
        raise ConfigError(unknown("kind", kind, KINDS))
    entries = _entries(kind)
    if as_json:
        _print_json(entries)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for entry in entries:
        table.add_row(f"[bold]{entry['name']}[/bold]", entry["description"])
    Console().print(table)


@app.command()
def show(
    what: Annotated[
        list[str],
        typer.Argument(help="A collection's folder, or a name; its kind may stand before it."),
    ],
    as_json: AsJson = False,
) -> None:
    """Show a collection, or one registered thing.

    Examples:
        `qtuning show demo-collection`

        `qtuning show stream order-09`
    """
    name = what[-1]
    if len(what) > 2 or (len(what) == 2 and f"{what[0]}s" not in KINDS):
        raise ConfigError(unknown("kind", what[0], [kind.removesuffix("s") for kind in KINDS]))
    kinds = [f"{what[0]}s"] if len(what) == 2 else list(KINDS)
    if len(what) == 1 and Path(name).exists():
        _show_collection(Path(name), as_json)
        return
    for kind in kinds:
        for entry in _entries(kind):
            if entry["name"] == name:
                _print_json({"kind": kind.removesuffix("s"), **entry})
                return
    names = [entry["name"] for kind in kinds for entry in _entries(kind)]
    if len(what) == 1:
        close = unknown("name", name, names).partition(" Known:")[0]
        raise ConfigError(f"{close} No collection lies there either; `qtuning ls` shows all names.")
    raise ConfigError(unknown(what[0], name, names))


@app.command()
def env(as_json: AsJson = False) -> None:
    """What a bug report needs: versions, device, models at hand.

    Example: `qtuning env --json`
    """
    from qtuning.environment import describe

    facts = describe()
    if as_json:
        _print_json(facts)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in facts.items():
        table.add_row(key, f"[bold]{value}[/bold]")
    Console().print(table)


def _entries(kind: str) -> list[dict[str, Any]]:
    """Registered things of one kind, each with a name and a one-line description."""
    if kind == "methods":
        from qtuning.methods import list_methods

        keys = ("name", "description", "paper", "families", "forgets", "stores_data", "packable")
        return [{key: getattr(info, key) for key in keys} for info in list_methods().values()]
    if kind == "models":
        from qtuning.backbones.sources import SOURCES

        return [
            {"name": name, "description": s.description, "hub_id": s.hub_id, "install": s.install}
            for name, s in SOURCES.items()
        ]
    if kind == "evictions":
        from qtuning.eviction import EVICTIONS

        return [
            {"name": name, "description": (rule.__doc__ or "").splitlines()[0]}
            for name, rule in EVICTIONS.items()
        ]
    if kind == "presets":
        from qtuning.presets import list_presets

        return [{"name": name, **entry} for name, entry in list_presets().items()]
    if kind == "protocols":
        from qtuning.protocols import PROTOCOLS

        return [
            {"name": name, "description": (rule.__doc__ or "").splitlines()[0]}
            for name, rule in PROTOCOLS.items()
        ]
    from qtuning.streams import list_cards, list_streams, list_tasks

    if kind == "streams":
        return [
            {"name": s.name, "description": s.description, "tasks": s.tasks}
            for s in list_streams().values()
        ]
    if kind == "datasets":
        return [asdict(card) for card in list_cards().values()]
    return [
        {"name": name, "description": card.description, "dataset": card.name, "labels": labels}
        for name, (card, labels) in list_tasks().items()
    ]


def _show_collection(folder: Path, as_json: bool) -> None:
    from qtuning.collection import read_collection

    saved, _ = read_collection(folder)
    if as_json:
        tasks = {
            name: {"labels": s.card.label_names, "version": saved.versions[name], **s.facts}
            for name, s in saved.snapshots.items()
        }
        _print_json(
            {
                "backbone": saved.backbone,
                "method": saved.method,
                "settings": saved.settings,
                "tasks": tasks,
            }
        )
        return
    console = Console()
    console.print(
        f"[bold]{folder}[/bold]: {counted(len(saved.snapshots), 'task')} on {saved.backbone['name']} "
        f"({saved.backbone['family']}), method {saved.method}"
    )
    table = Table()
    for heading in ("task", "labels", "validation", "test", "prompt vectors", "version"):
        table.add_column(heading)
    for name, snapshot in saved.snapshots.items():
        table.add_row(
            name,
            ", ".join(snapshot.card.label_names),
            _percent(snapshot.facts.get("validation_score")),
            _percent(snapshot.facts.get("test_score")),
            str(len(snapshot.rows)),
            str(saved.versions[name]),
        )
    console.print(table)


def _join(tuner: QTuner, folder: Path, name: str, replace: bool) -> QTuner:
    """The collection that others left in the folder, with our new task; what cannot join is kept beside it."""
    try:
        newest = tuner.from_pretrained(folder, model=tuner.backbone)
        newest.add_prompt(tuner.state.snapshots[name], replace=replace)
        newest.save_pretrained(folder)
        return newest
    except QTuningError as error:
        place = folder.resolve()
        kept = mkdtemp(prefix=f"{place.name}-{name}-", dir=place.parent)
        tuner.save_pretrained(kept)
        raise CollectionError(
            f"{folder} was changed while {name!r} was learnt, and the task cannot join it: {error} "
            f"What was learnt is kept in {kept}; use that collection, or learn the task again."
        ) from error


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _print_json(value: Any, indent: int | None = 2) -> None:
    typer.echo(json.dumps(value, indent=indent, ensure_ascii=False))
