"""Texts of a named task: from the catalog, a folder of Parquet files, the hub, or a table of the user's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from qtuning.errors import ConfigError, TaskError, unknown
from qtuning.streams import Card, Stream, is_file_name, list_tasks
from qtuning.task_files import read_records, read_task
from qtuning.tasks import Split, Task


def load_task(name: str, data: str | Path | None = None) -> Task:
    """A task of the catalog, or of a table file, with its texts.

    Args:
        name: A name that `qtuning ls tasks` prints, or a path to a CSV, TSV, JSONL or Parquet file.
        data: Folder with `<data set>/train.parquet` and `test.parquet`; the variable `QTUNING_DATA`
            by default, and the hub where there is neither.
    """
    if is_file_name(name):
        return read_task(name)
    known = list_tasks()
    if name not in known:
        raise ConfigError(unknown("task", name, known))
    card, labels = known[name]
    if card.file:
        return _shipped(card)
    rows = _from_folder(card, Path(data or os.environ["QTUNING_DATA"])) if data or os.environ.get(
        "QTUNING_DATA"
    ) else _from_hub(card)  # fmt: skip
    return _make_task(name, card, labels, rows)


def load_stream(stream: Stream, data: str | Path | None = None) -> list[Task]:
    """All tasks of a stream, in order."""
    return [load_task(name, data) for name in stream.tasks]


def fingerprint(split: Split) -> str:
    """A hash of the very rows a run used, in each part: the same data, the same fingerprint."""
    digest = hashlib.sha256()
    for part in (split.train, split.validation, split.test):
        digest.update(f"\x1e{len(part)}".encode())
        for text, label in zip(part.texts, part.labels, strict=True):
            digest.update(f"\x1f{label}\x1f{text}".encode())
    return digest.hexdigest()[:16]


def _shipped(card: Card) -> Task:
    with as_file(files("qtuning") / "catalog" / card.file) as path:
        return read_task(
            path,
            card.name,
            label_names=list(card.labels),
            label_words=dict(card.label_words),
            metric="+".join(card.metrics),
            description=card.description,
        )


@lru_cache(maxsize=4)
def _rows_in(file: Path) -> list[dict[str, Any]]:
    """A file's rows, kept while the pairs of one large set are made from it."""
    return read_records(file)


def _from_folder(card: Card, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for part in ("train", "test"):
        file = folder / card.name / f"{part}.parquet"
        if not file.is_file():
            raise TaskError(
                f"the data set {card.name!r} is not in {folder} ({part}.parquet is missing); put it there, or leave "
                f"--data and QTUNING_DATA out to fetch {card.hub['id']!r} from the hub."
            )
        rows += [{**row, "split": part} for row in _rows_in(file)]
    return rows


def _from_hub(card: Card) -> list[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise TaskError(
            "fetching data sets needs the package datasets: pip install 'qtuning[bench]', or give a folder of "
            "Parquet files with --data."
        ) from None
    renamed = {there: here for here, there in card.hub.get("columns", {}).items()}
    label = card.hub.get("label", "label")
    first = int(card.hub.get("first_label", 0))
    rows: list[dict[str, Any]] = []
    try:
        found = datasets.load_dataset(card.hub["id"], card.hub.get("config"))
        test = card.hub.get("test") or (
            "validation" if card.group in ("glue", "super-glue") else "test"
        )
        for part, source in (("train", "train"), ("test", test)):
            for row in found[source]:
                row = {renamed.get(key, key): value for key, value in row.items()}
                rows.append({**_flat(row), "label": row[label] - first, "split": part})
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TaskError(
            f"the data set {card.name!r} could not be fetched as {card.hub['id']!r}: "
            f"{reason.rstrip('.')}. Give a folder of Parquet files with --data."
        ) from None
    return rows


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """`idx: {question: 3}` as `idx_question: 3`, as the folders of Parquet files have it."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        nested = value.items() if isinstance(value, Mapping) else [("", value)]
        flat |= {f"{key}_{inner}" if inner else key: each for inner, each in nested}
    return flat


def _make_task(
    name: str, card: Card, labels: tuple[str, ...], rows: Iterable[Mapping[str, Any]]
) -> Task:
    everything = list(card.labels)
    texts, gold, splits, groups = [], [], [], []
    for row in rows:
        label = everything[int(row["label"])]
        text = render(card, row) if label in labels else ""
        if text:
            texts.append(text)
            gold.append(label)
            splits.append(row["split"])
            groups.append(str(row.get(card.question_id, "")) if card.question_id else "")
    return Task(
        name,
        texts,
        gold,
        label_names=labels,
        label_words={label: card.label_words[label] for label in labels},
        metric="+".join(card.metrics) if len(labels) == len(everything) else "accuracy",
        splits=splits,
        groups=groups if card.question_id else None,
        description=card.description,
    )


def render(card: Card, row: Mapping[str, Any]) -> str:
    """The text of a row: one field as it is, several as `field: value`, in the card's order.

    A row that has none of the fields but a `text` (some samples of Yahoo) gives that.
    """
    values = [(column, row.get(column)) for column in card.fields]
    present = [(column, value) for column, value in values if value not in (None, "")]
    if not present:
        return str(row.get("text") or "").strip()
    if len(card.fields) == 1:
        return str(present[0][1]).strip()
    return " ".join(f"{column}: {value}" for column, value in present).strip()
