"""The command that writes tasks for other programs. Registered in `cli.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    collection: Annotated[Path, typer.Argument(help="Folder of the collection.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new or empty folder.")],
    to: Annotated[
        str, typer.Option(help="peft (an adapter), or embeddings (prompt vectors).")
    ] = "peft",
    task: Annotated[
        str | None, typer.Option(help="Which task; all, a folder each, if left out.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(help="Also upload it to this hub repository, owner/name.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
) -> None:
    """Write tasks of a collection as PEFT adapters or prompt embeddings, with a model card.

    An encoder's tasks fit PEFT if they were learnt in its layout: `qtuning learn --readout peft`. Embeddings always do.

    Examples:
        `qtuning export support --task refunds --to peft -o refunds-adapter`

        `qtuning export support --to embeddings -o prompts`

        `qtuning export support --task refunds -o refunds-adapter --push me/refunds`
    """
    from qtuning.errors import ConfigError, unknown
    from qtuning.export import FORMATS
    from qtuning.export import export as export_tasks
    from qtuning.hub import check_repo, push_folder
    from qtuning.tuner import QTuner

    if to not in FORMATS:
        raise ConfigError(unknown("export format", to, FORMATS))
    if push:
        check_repo(push)
    tuner = QTuner.from_pretrained(collection, device="cpu")
    export_tasks(tuner, None if task is None else [task], output, to=to)
    count = len(tuner.tasks) if task is None else 1
    typer.echo(f"wrote {count} task{'s' if count > 1 else ''} to {output} ({to})")
    if push:
        typer.echo(f"uploaded to {push_folder(output, push, private=private or None)}")
