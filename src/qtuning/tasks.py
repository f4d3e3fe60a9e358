"""A task: labelled texts with names for the labels; and its few-shot split."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from qtuning.errors import TaskError
from qtuning.evaluation import METRICS
from qtuning.seeding import numpy_generator

if TYPE_CHECKING:
    from datasets import Dataset

Text = str | tuple[str, str]
"""One text, or a pair of texts (premise and hypothesis, two questions)."""

SPLIT_NAMES = ("train", "validation", "test")
MAX_CLASSES = 1000
_SURROGATE = re.compile("[\ud800-\udfff]")
_FRACTION = re.compile(r"[+-]?\d*\.\d*[1-9]\d*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_task_name(name: str) -> str:
    """The name, if it can also be the name of a folder on every system."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith("."):
        raise TaskError(
            f"a task name must be 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit; "
            f"got {name!r}. Rename the task."
        )
    return name


@dataclass(frozen=True)
class Rows:
    """Texts with their label ids: one part of a split."""

    texts: tuple[Text, ...]
    labels: tuple[int, ...]
    groups: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, places: Sequence[int]) -> Rows:
        """The rows at these places."""
        return Rows(
            tuple(self.texts[i] for i in places),
            tuple(self.labels[i] for i in places),
            None if self.groups is None else tuple(self.groups[i] for i in places),
        )


@dataclass(frozen=True)
class Split:
    """Train, validation and test rows of one task, and what had to be done to get them."""

    train: Rows
    validation: Rows
    test: Rows
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Rows in each part."""
        return {name: len(getattr(self, name)) for name in SPLIT_NAMES}


@dataclass(frozen=True)
class Task:
    """Labelled texts. `Task("tone", texts, labels)` is enough; the rest has defaults.

    Attributes:
        name: Also the name of its folder in a collection.
        texts: Strings, or pairs of strings.
        labels: One label per text: a name, or an id if `label_names` is given.
        label_names: All labels, in order; by default those that occur, sorted.
        label_words: What a generative model should answer for each label (verbaliser); by default
            the label name with spaces for underscores.
        metric: Name of the score, e.g. `accuracy` or `accuracy+f1` (the mean of both).
        groups: For each text what it belongs to (the question of an answer), for `exact-match`.
        splits: For each text `train`, `validation` or `test`, where the division is given.
        description: One line for people.
    """

    name: str
    texts: Sequence[Text]
    labels: Sequence[Any]
    label_names: Sequence[str] = ()
    label_words: Mapping[str, str] | None = None
    metric: str = "accuracy"
    splits: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    description: str = ""
    label_ids: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_task_name(self.name)
        if not self.metric or any(part not in METRICS for part in self.metric.split("+")):
            raise TaskError(
                f"task {self.name!r}: metric must be one of {', '.join(METRICS)}, or some joined by +; "
                f"got {self.metric!r}."
            )
        for field_name in ("texts", "labels", "splits", "groups"):
            values = getattr(self, field_name)
            if hasattr(values, "tolist"):  # an array or a Series, which is neither true nor false
                self._set(field_name, values.tolist())
        if len(self.texts) != len(self.labels):
            raise TaskError(
                f"task {self.name!r}: {len(self.texts)} texts but {len(self.labels)} labels; give one label per text."
            )
        if self.splits is not None and len(self.splits) != len(self.texts):
            raise TaskError(
                f"task {self.name!r}: {len(self.texts)} texts but {len(self.splits)} entries in splits; "
                f"give one per text."
            )
        if not self.texts:
            raise TaskError(f"task {self.name!r} has no rows; give at least two per class.")
        self._set(
            "texts", tuple(_clean_text(self._row(i), text) for i, text in enumerate(self.texts, 1))
        )
        kinds = {isinstance(text, tuple) for text in self.texts}
        if len(kinds) > 1:
            raise TaskError(f"task {self.name!r} mixes single texts and pairs; use one kind.")
        names = tuple(str(name) for name in self.label_names)
        known = frozenset(names)
        labels = [
            _clean_label(self._row(i), label, names, known)
            for i, label in enumerate(self.labels, 1)
        ]
        self._set("labels", tuple(labels))
        self._set("label_names", names or tuple(sorted(set(labels))))
        _check_labels(self.name, labels, self.label_names)
        index = {name: i for i, name in enumerate(self.label_names)}
        self._set("label_ids", tuple(index[label] for label in labels))
        self._set("label_words", clean_words(self.name, self.label_names, self.label_words))
        if self.splits is not None:
            self._set(
                "splits", tuple(_clean_split(self._row(i), s) for i, s in enumerate(self.splits, 1))
            )

    def _row(self, number: int) -> str:
        return f"task {self.name!r}, row {number} (a header not counted)"

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(
            self, name, value
        )  # the dataclass is frozen; only __post_init__ does this

    @property
    def is_pair(self) -> bool:
        """Whether each row is a pair of texts."""
        return isinstance(self.texts[0], tuple)

    @classmethod
    def from_file(cls, path: str | PathLike[str], name: str | None = None, **columns: Any) -> Task:
        """From a CSV, TSV, JSONL or Parquet file; `columns` as in `task_files.read_task`."""
        from qtuning.task_files import read_task

        return read_task(path, name=name, **columns)

    from_csv = from_file  # the reader goes by the ending; the name people look for

    @classmethod
    def from_dataset(cls, dataset: Dataset, name: str, **columns: Any) -> Task:
        """From a `datasets.Dataset` or a `DatasetDict` with train, validation and test."""
        from qtuning.task_files import task_from_dataset

        return task_from_dataset(dataset, name, **columns)

    def split(self, shots: int = 16, seed: int = 0, validation_limit: int = 500) -> Split:
        """A deterministic, stratified few-shot split: the same for the same seed, on any machine.

        Args:
            shots: Training rows per class; 0 takes all.
            seed: Chooses the rows.
            validation_limit: Validation rows per class at most.

        Where the task's rows are marked train, validation and test, each part comes from its own rows.
        Otherwise rows left over after training are shared between validation (up to the limit) and
        test. A class that is too short for that is shared out 3:1:1, and the notes say so.
        """
        parts: dict[str, list[int]] = {name: [] for name in SPLIT_NAMES}
        notes: list[str] = []
        marked = set(self.splits or ())
        for label, label_name in enumerate(self.label_names):
            pools: dict[str, list[int]] = {name: [] for name in SPLIT_NAMES}
            for i, row_label in enumerate(self.label_ids):
                if row_label == label:
                    pools[self.splits[i] if self.splits else "train"].append(i)
            generator = numpy_generator("split", seed, self.name, label_name)
            pools = {
                k: [pool[j] for j in generator.permutation(len(pool))] for k, pool in pools.items()
            }
            taken = _share_out(pools, shots, validation_limit, marked)
            if not taken["train"]:
                raise TaskError(
                    f"task {self.name!r}: class {label_name!r} has no rows to train from; mark some of them "
                    f"train in the split column."
                )
            for part, rows in taken.items():
                parts[part] += rows
            if shots and len(taken["train"]) < shots:
                notes.append(
                    f"class {label_name!r} has {len(pools['train'])} rows to train from: "
                    f"{len(taken['train'])} taken, not {shots}"
                )
        if self.splits is None:
            notes.append("no test rows were given: those left over after training were shared between "
                         "validation and test")  # fmt: skip
        folded = [name.casefold() for name in self.label_names]
        if alike := [
            n for n, f in zip(self.label_names, folded, strict=True) if folded.count(f) > 1
        ]:
            notes.append(
                f"the labels {', '.join(alike)} differ in case alone; are they meant to be several?"
            )
        if not parts["validation"]:
            notes.append("no rows are left for validation: the last state of training is kept")
        train, validation, test = (self.pick(sorted(parts[name])) for name in SPLIT_NAMES)
        seen = set(train.texts)
        for part, held in (("validation", validation), ("test", test)):
            if again := sum(text in seen for text in held.texts):
                notes.append(f"{again} of {len(held)} {part} texts stand among those to train from, too: "
                             "their score flatters")  # fmt: skip
        return Split(train, validation, test, tuple(notes))

    def rows(self, part: str = "all") -> Rows:
        """All rows, or those marked train, validation or test."""
        marks = self.splits or ["all"] * len(self.texts)
        return self.pick([i for i, mark in enumerate(marks) if part in ("all", mark)])

    def pick(self, places: Sequence[int]) -> Rows:
        """The rows at these places."""
        groups = None if self.groups is None else tuple(map(str, self.groups))
        return Rows(tuple(self.texts), self.label_ids, groups).at(places)


def _share_out(
    pools: dict[str, list[int]], shots: int, validation_limit: int, marked: set[str]
) -> dict[str, list[int]]:
    """Rows of one class for each part; `marked` are the parts that any row of the task is marked for."""
    train, validation, test = (pools[name] for name in SPLIT_NAMES)
    if not marked & {"validation", "test"}:
        held_out = max(len(train) - shots, 0) if shots else 0
        if held_out < 2:  # too short to fill the shots and still judge the result
            held_out = 2 * (len(train) // 5) if len(train) >= 5 else max(len(train) - 2, 0)
        rest, train = train[len(train) - held_out :], train[: len(train) - held_out]
        size = min(validation_limit, math.ceil(len(rest) / 2))
        validation, test = rest[:size], rest[size:]
    elif "validation" not in marked:
        spare = train[shots:] if shots else train[: len(train) // 5]
        train = train[:shots] if shots else train[len(spare) :]
        validation = spare
    return {
        "train": train[:shots] if shots else train,
        "validation": validation[:validation_limit],
        "test": test,
    }


def _clean_text(where: str, text: Any) -> Text:
    if isinstance(text, list | tuple):
        if len(text) != 2:
            raise TaskError(
                f"{where}: a text is a string or a pair of strings, got {len(text)} parts."
            )
        return _clean_one(where, text[0]), _clean_one(where, text[1])
    return _clean_one(where, text)


def _clean_one(where: str, text: Any) -> str:
    if not isinstance(text, str):
        raise TaskError(f"{where}: the text must be a string, got {type(text).__name__} {text!r}.")
    if not text.strip():
        raise TaskError(f"{where}: the text is empty; remove the row or fill it.")
    check_whole(f"{where}: the text", text)
    return text


def check_whole(what: str, text: str) -> None:
    """Refuse half a character (a surrogate without its other half): no tokenizer takes it, no file can hold it."""
    if not text.isascii() and (half := _SURROGATE.search(text)):
        raise TaskError(
            f"{what} has half a character ({half[0]!r}); write it whole, as UTF-8, or take it out."
        )


def _clean_label(where: str, label: Any, names: tuple[str, ...], known: frozenset[str]) -> str:
    if hasattr(label, "tolist"):  # numpy
        label = label.tolist()
    if isinstance(label, list | tuple | set | dict):
        raise TaskError(
            f"{where}: got several labels {label!r}. Multi-label data is out of scope: "
            f"one label per text. Make one yes/no task per label instead."
        )
    # what is not a number, and NA of pandas, does not equal itself
    if label is None or (label == label) is not True or label == "":
        raise TaskError(f"{where}: the label is missing; fill it or drop the row.")
    if (isinstance(label, float) and not label.is_integer()) or (
        isinstance(label, str) and _FRACTION.fullmatch(label.strip())
    ):
        raise TaskError(
            f"{where}: the label {label!r} is a fraction; labels are classes, not quantities."
        )
    if isinstance(label, int | float) and not isinstance(label, bool) and names:
        if str(int(label)) in known:
            return str(int(label))
        if not 0 <= int(label) < len(names):
            raise TaskError(
                f"{where}: label id {int(label)} has no name; {len(names)} names were given; "
                f"give one for each id."
            )
        return names[int(label)]
    text = str(int(label)) if isinstance(label, float) else str(label).strip()
    check_whole(f"{where}: the label", text)
    if names and text not in known:
        raise TaskError(f"{where}: unknown label {text!r}; the labels are {', '.join(names)}.")
    return text


def _check_labels(task: str, labels: Sequence[str], names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise TaskError(f"task {task!r}: a label name is given twice in {list(names)}.")
    if len(names) > MAX_CLASSES or (len(names) > 20 and len(names) > 0.5 * len(labels)):
        raise TaskError(
            f"task {task!r}: {len(names)} different labels in {len(labels)} rows; is the label column the right one?"
        )
    found = set(labels)
    missing = [name for name in names if name not in found]
    if missing:
        raise TaskError(
            f"task {task!r}: no row has the label {missing[0]!r}; add some or remove it."
        )
    if len(names) < 2:
        raise TaskError(
            f"task {task!r} has only the class {names[0]!r}; a task needs at least two classes."
        )


def clean_words(task: str, names: Sequence[str], words: Mapping[str, str] | None) -> dict[str, str]:
    """Label words for every label, those that are not given from its name; all different."""
    if words is not None and not isinstance(words, Mapping):
        raise TaskError(
            f"task {task!r}: label_words must be a mapping of label to words, got {words!r}."
        )
    given = dict(words or {})
    for label in given:
        if label not in names:
            raise TaskError(
                f"task {task!r}: label_words names {label!r}, which is no label; the labels are {', '.join(names)}."
            )
    found = {name: str(given.get(name, name.replace("_", " "))).strip() for name in names}
    for name, word in found.items():
        if not word:
            raise TaskError(f"task {task!r}: the label words of {name!r} are empty; fill them.")
    if len(set(found.values())) != len(found):
        raise TaskError(
            f"task {task!r}: two labels share the same label words: {found}; give each label its own."
        )
    return found


def _clean_split(where: str, split: Any) -> str:
    name = {"val": "validation", "valid": "validation", "dev": "validation"}.get(
        str(split), str(split)
    )
    if name not in SPLIT_NAMES:
        raise TaskError(f"{where}: split must be train, validation or test, got {split!r}.")
    return name
