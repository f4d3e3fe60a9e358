"""Labels for the rows of a file, batch by batch: in this process, or spread over Ray.

Both ways cut a file into the same batches and answer each in one go, so they give the same answers; a file need not fit
into memory to be labelled on Ray.
"""

from __future__ import annotations

import csv
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtuning.errors import ConfigError, QTuningError, TaskError, unknown
from qtuning.predictor import check_texts
from qtuning.task_files import ENDINGS, read_json_line, read_records
from qtuning.tasks import Text

if TYPE_CHECKING:
    from qtuning.tuner import QTuner

BATCH = 256
"""Rows that are answered together."""
ANSWER = ("task", "similarity", "label", "probabilities")
"""Columns of an answer; the file's own columns of these names are kept as `given_…`."""
OUTPUTS = (".jsonl", ".csv")
READ_BYTES = 2**24
"""Of a file that Ray reads at a time: no row may be longer."""


@dataclass(frozen=True)
class Asked:
    """What is asked of each row of a file."""

    file: Path
    task: str | None = None
    text: str = "text"
    """Column of the text, in a table."""
    text_b: str | None = None
    """Column of the second text in a table, `text_b` if there is one; for a file of lines, the second text itself."""

    @property
    def is_table(self) -> bool:
        """Columns with names, rather than one text per line."""
        return self.file.suffix.lower() in ENDINGS

    def check(self) -> None:
        """Refuse a file that is not there or is empty, before a model is loaded for it."""
        if not self.file.is_file():
            raise TaskError(f"there is no file {str(self.file)!r}; check the path.")
        if not self.file.stat().st_size:
            raise TaskError(f"{self.file.name} has no rows; give at least one text.")

    @property
    def shown(self) -> str:
        """The text's column among the answers."""
        return _kept(self.text) if self.is_table else "text"


def answers(tuner: QTuner, texts: list[Text], task: str | None) -> Iterator[dict[str, Any]]:
    """Label and probabilities of each text; task and similarity too where the task had to be found."""
    if task is not None or len(tuner.tasks) == 1:
        found: Any = tuner.predict_proba(texts, task)
        for each in found:
            yield {"label": max(each, key=each.__getitem__), "probabilities": each}
        return
    for answer in tuner.answer(texts):  # type: ignore[union-attr]  # a list for a list
        yield {name: getattr(answer, name) for name in ANSWER}


def label_rows(
    tuner: QTuner, rows: Sequence[Mapping[str, Any]], asked: Asked
) -> Iterator[dict[str, Any]]:
    """Each row with its answer."""
    texts = [_text_of(row, asked) for row in rows]
    for row, answer in zip(rows, answers(tuner, texts, asked.task), strict=True):
        yield {**{_kept(name): row[name] for name in row}, **answer}


def label_file(tuner: QTuner, asked: Asked) -> Iterator[dict[str, Any]]:
    """The rows of a file with their answers, in the file's order; all are checked before the first is answered."""
    rows = read_records(asked.file) if asked.is_table else list(_read_lines(asked.file))
    for number, row in enumerate(rows, 1):
        where = f"{asked.file.name}, row {number} (a header not counted)"
        check_texts([_text_of(row, asked)], f"{where}: the text")
    for first in range(0, len(rows), BATCH):
        yield from label_rows(tuner, rows[first : first + BATCH], asked)


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write rows to a JSONL or CSV file, which is there only when all are written; returns their number."""
    beside = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    try:
        with beside.open("w", encoding="utf-8", newline="") as stream:
            table: Any = None
            for row in rows:
                count += 1
                if path.suffix == ".jsonl":
                    stream.write(to_json(row) + "\n")
                    continue
                flat = {k: to_json(v) if isinstance(v, Mapping) else v for k, v in row.items()}
                if table is None:
                    table = csv.DictWriter(stream, list(flat))
                    table.writeheader()
                if more := [name for name in flat if name not in table.fieldnames]:
                    raise TaskError(
                        f"row {count} has {more[0]!r}, which the first row has not; write a .jsonl instead."
                    )
                table.writerow(flat)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return count


def check_output(path: Path) -> None:
    """Refuse an ending that cannot be written, before the work."""
    if path.suffix not in OUTPUTS:
        raise ConfigError(f"--output must end in {' or '.join(OUTPUTS)}, got {path.name!r}.")


def to_json(value: Any) -> str:
    """One line; dates and the like, which only Parquet has, as text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _kept(name: str) -> str:
    return f"given_{name}" if name in ANSWER else name


def _text_of(row: Mapping[str, Any], asked: Asked) -> Text:
    if not asked.is_table:
        return (row["text"], asked.text_b) if asked.text_b else row["text"]
    for column in (asked.text, *filter(None, (asked.text_b,))):
        if column not in row:
            raise TaskError(f"{asked.file.name}: {unknown('column', column, row)}")
    second = asked.text_b or ("text_b" if "text_b" in row else None)
    return (row[asked.text], row[second]) if second else row[asked.text]


def _read_lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with file.open(encoding="utf-8-sig") as stream:
            for line in stream:
                if line.strip():
                    yield {"text": line.rstrip("\n")}
    except UnicodeDecodeError:
        raise TaskError(f"{file} is not UTF-8; save it as UTF-8.") from None


# ── on Ray ───────────────────────────────────────────────────────────────────────────────────


def label_on_ray(
    collection: Path,
    asked: Asked,
    *,
    device: str | None = None,
    address: str | None = None,
    workers: int | None = None,
) -> Iterator[dict[str, Any]]:
    """`label_file` on Ray: each worker opens the collection once, rows come back in the file's order.

    Args:
        collection: Folder that every node can read.
        asked: The file, which every node can read, and what is asked.
        device: Of the workers.
        address: See `ray_cluster.connected`.
        workers: At most; by default one for each GPU, or for each core but one.
    """
    from qtuning.ray_cluster import cause_of, connected

    asked.check()
    with connected(address) as ray:
        import ray.data as ray_data

        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what fails is said below
        context = ray_data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        there = ray.cluster_resources()
        on_card = (not device or device.startswith("cuda")) and there.get("GPU", 0) > 0
        most = workers or int(there["GPU"] if on_card else max(1, there["CPU"] - 1))
        labelled = (
            _read_on_ray(ray_data, asked)
            .repartition(target_num_rows_per_block=BATCH, strict=True)
            .map_batches(
                _Worker,
                fn_constructor_args=(collection, asked, device, os.getcwd()),
                batch_size=None,
                batch_format="pyarrow",
                num_cpus=1,
                num_gpus=1 if on_card else None,
                compute=ray_data.ActorPoolStrategy(min_size=1, max_size=most),
            )
        )
        try:
            for row in labelled.iter_rows():
                if row["error"]:
                    raise TaskError(row["error"])
                yield json.loads(row["line"])
        except ray.exceptions.RayError as error:
            raise TaskError(
                f"{asked.file.name} could not be labelled on Ray ({cause_of(error)}); without --ray the row at "
                f"fault is named."
            ) from error


class _Worker:
    """A collection, opened once, that answers batches; what is wrong comes back as words."""

    def __init__(self, collection: Path, asked: Asked, device: str | None, folder: str):
        os.chdir(folder)  # a collection may name its model by a path from there
        self.collection, self.asked, self.device = collection, asked, device
        self.tuner: QTuner | None = None

    def __call__(self, batch: Any) -> dict[str, list[str]]:
        from qtuning.tuner import QTuner

        rows, asked = batch.to_pylist(), self.asked
        try:
            self.tuner = self.tuner or QTuner.from_pretrained(self.collection, device=self.device)
            if asked.file.suffix.lower() == ".jsonl":
                rows = [read_json_line(row["text"], asked.file.name) for row in rows]
            lines = [to_json(row) for row in label_rows(self.tuner, rows, asked)]
        except QTuningError as error:
            return {"line": [""], "error": [str(error)]}
        return {"line": lines, "error": [""] * len(lines)}


def _read_on_ray(ray_data: Any, asked: Asked) -> Any:
    """The file as rows of Ray Data; cells of text stay text, as in `read_records`."""
    from pyarrow import csv as arrow_csv
    from pyarrow import string

    file, ending = str(asked.file.resolve()), asked.file.suffix.lower()
    if ending == ".parquet":
        return ray_data.read_parquet(file)
    reading = arrow_csv.ReadOptions(block_size=READ_BYTES)
    if ending in (".csv", ".tsv"):
        separator = "\t" if ending == ".tsv" else ","
        with asked.file.open(encoding="utf-8-sig", newline="") as stream:
            names = next(csv.reader(stream, delimiter=separator), [])
        parsing = arrow_csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    else:  # a line is a row: one column, with a separator that texts and JSON do not contain
        names = ["text"]
        reading.column_names = names
        parsing = arrow_csv.ParseOptions(delimiter="\x1f", quote_char=False)
    kinds = arrow_csv.ConvertOptions(
        column_types=dict.fromkeys(names, string()), strings_can_be_null=False
    )
    return ray_data.read_csv(
        file,
        read_options=reading,
        parse_options=parsing,
        convert_options=kinds,
        file_extensions=None,
    )
