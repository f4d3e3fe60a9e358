"""Tasks from files and from `datasets`: CSV, TSV, JSONL, Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from qtuning.errors import TaskError, unknown
from qtuning.tasks import Task

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")


def read_task(
    path: str | PathLike[str],
    name: str | None = None,
    *,
    text: str = "text",
    text_b: str | None = None,
    label: str = "label",
    split: str | None = None,
    **task_fields: Any,
) -> Task:
    """One task from a table with a text column and a label column.

    Args:
        path: The file; its ending chooses the reader.
        name: Name of the task; the file's stem by default.
        text: Column of the text.
        text_b: Column of the second text, for pairs; `text_b` is taken if there is one.
        label: Column of the label.
        split: Column that says train, validation or test; `split` is taken if there is one.
        **task_fields: Other fields of `Task`, such as `label_names` or `label_words`.
    """
    file = Path(path)
    if not file.is_file():
        raise TaskError(f"there is no file {str(path)!r}; check the path.")
    records = read_records(file)
    if not records:
        raise TaskError(f"{file.name} has no rows; give at least two per class.")
    return _task_from_records(
        records,
        file.stem if name is None else name,
        text,
        text_b,
        label,
        split,
        file.name,
        task_fields,
    )


def task_from_dataset(
    dataset: Any,
    name: str,
    *,
    text: str = "text",
    text_b: str | None = None,
    label: str = "label",
    **task_fields: Any,
) -> Task:
    """One task from a `datasets.Dataset`, or from a mapping of split names to such."""
    parts = dataset if isinstance(dataset, Mapping) else {"": dataset}
    records: list[dict[str, Any]] = []
    for part, rows in parts.items():
        records += [{**row, **({"split": part} if part else {})} for row in rows]
        feature = getattr(rows, "features", {}).get(label)
        if feature is not None and hasattr(feature, "names"):  # ClassLabel: ids with names
            task_fields.setdefault("label_names", list(feature.names))
    if not records:
        raise TaskError(f"the dataset given for task {name!r} has no rows.")
    return _task_from_records(records, name, text, text_b, label, None, "the dataset", task_fields)


def _task_from_records(
    records: Sequence[Mapping[str, Any]],
    name: str,
    text: str,
    text_b: str | None,
    label: str,
    split: str | None,
    source: str,
    task_fields: dict[str, Any],
) -> Task:
    columns = list(records[0])
    for wanted in (text, label, *filter(None, (text_b, split))):
        if wanted not in columns:
            if len(columns) == 1 and (
                separator := next((s for s in ";\t|" if s in columns[0]), "")
            ):
                raise TaskError(
                    f"{source} looks separated by {separator!r}; save it with commas, or with tabs as .tsv."
                )
            raise TaskError(
                f"{source}: {unknown('column', wanted, columns)} Name yours with --text, --text-b and --label."
            )
    text_b = text_b or ("text_b" if "text_b" in columns else None)
    split = split or ("split" if "split" in columns else None)
    return Task(
        name,
        [(row.get(text), row.get(text_b)) if text_b else row.get(text) for row in records],  # type: ignore[misc]  # Task checks
        [row.get(label) for row in records],
        splits=[row.get(split) for row in records] if split else None,  # type: ignore[misc]  # Task checks
        **task_fields,
    )


def read_records(file: Path) -> list[dict[str, Any]]:
    """The rows of a table, each a mapping of column to value."""
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        raise TaskError(f"{file.name}: cannot read {ending or 'a file without ending'!r}; "
                        f"use {', '.join(ENDINGS)}.")  # fmt: skip
    if ending == ".parquet":
        return _read_parquet(file)
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            if ending == ".jsonl":
                return _read_json_lines(file, stream)
            return _read_table(file, stream, "\t" if ending == ".tsv" else ",")
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{file.name} is not UTF-8 (byte {error.start}); save it as UTF-8."
        ) from None


def _read_table(file: Path, stream: Iterable[str], delimiter: str) -> list[dict[str, Any]]:
    """The rows; refused where a quotation mark that is not closed would take the next rows into a text.

    In a CSV every mark that opens a text is closed right before a comma or the end of a line. In a TSV marks are often
    characters like others: there a text over several lines gives itself away by the tabs of the rows it took in.
    """
    rows: list[dict[str, Any]] = []
    reader = csv.DictReader(stream, delimiter=delimiter, strict=delimiter == ",")
    first_line = 1
    try:
        if reader.fieldnames is None:
            return rows
        first_line = reader.line_num + 1
        for row in reader:
            if None in row:
                raise TaskError(
                    f"{file.name}, line {reader.line_num}: more fields than columns; quote texts that contain "
                    f"the separator."
                )
            if delimiter == "\t" and any("\t" in c and "\n" in c for c in row.values() if c):
                raise csv.Error(f"it goes on to line {reader.line_num}")
            rows.append(row)
            first_line = reader.line_num + 1
    except csv.Error as error:
        raise TaskError(
            f"{file.name}, line {first_line}: a text that begins with a quotation mark must end with one, and those "
            f"inside be doubled ({error}); mend it, or save the table as JSONL."
        ) from None
    return rows


def _read_json_lines(file: Path, stream: Any) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(stream, start=1):
        if line.strip():
            rows.append(read_json_line(line, f"{file.name}, line {number}"))
    return rows


def read_json_line(line: str, source: str) -> dict[str, Any]:
    """A row of a JSONL file; `source` is named where it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        said = getattr(error, "msg", type(error).__name__)
        raise TaskError(f"{source}: not JSON ({said}); each line must be a JSON object.") from None
    if not isinstance(row, dict):
        raise TaskError(f"{source}: each line must be a JSON object.")
    return row


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise TaskError(
            "reading Parquet needs pyarrow: pip install 'qtuning[bench]', or save the table as CSV."
        ) from None
    try:
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:
        raise TaskError(
            f"{file.name} is not a readable Parquet file; save it again. ({error})"
        ) from None
    return rows
