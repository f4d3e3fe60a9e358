"""Prompts that PEFT trained elsewhere, as snapshots that a collection can take in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qtuning.backbones import Backbone, Head
from qtuning.errors import ExportError, TaskError
from qtuning.export import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    HEAD_KEYS,
    PROMPT_KEY,
    TASK_FILE,
    TASK_TYPES,
)
from qtuning.hub import local_folder
from qtuning.snapshots import Snapshot, TaskCard
from qtuning.tasks import check_task_name, clean_words


def import_peft(
    folder: str | PathLike[str],
    backbone: Backbone,
    *,
    name: str | None = None,
    label_names: Sequence[str] | None = None,
    label_words: Mapping[str, str] | None = None,
    metric: str | None = None,
    is_pair: bool | None = None,
) -> Snapshot:
    """A PEFT prompt-tuning adapter as a snapshot, for `QTuner.add_prompt`; PEFT is not needed for it.

    What is not given comes from the `task.json` that our own exports have. The adapter must have been trained on the
    weights of `backbone`, for the label words and in the way of writing texts that we score with (docs/export.md).

    Args:
        folder: The adapter's, or its name on the hub.
        backbone: The model it was trained on.
        name: Of the task; the folder's by default.
        label_names: All labels in order; for an encoder in the order of its classifier.
        label_words: What the model was taught to answer for each label; by default its name.
        metric: Of the task.
        is_pair: Whether it takes pairs of texts.

    Raises:
        ExportError: When the adapter is of another kind, or does not fit the model.
    """
    path = local_folder(folder)
    config = _read_json(path / ADAPTER_CONFIG, "an adapter has one")
    _check_kind(path, config, backbone)
    tensors = _read_tensors(path)
    rows = _rows(path, config, tensors, backbone)
    ours = _read_json(path / TASK_FILE, "") if (path / TASK_FILE).is_file() else {}
    _check_weights(path, ours, backbone)
    if label_names is None and not ours:
        raise TaskError(
            f"{path} does not say its labels, which PEFT's format has no place for; give label_names."
        )
    task = check_task_name(name or ours.get("task") or path.name)
    said = dict(zip(ours.get("labels", ()), ours.get("label_words", ()), strict=False))
    names = tuple(said if label_names is None else label_names)
    if label_words is None and said:
        label_words = {each: said.get(each, each) for each in names}
    metric = metric or ours.get("metric", "accuracy")
    is_pair = ours.get("is_pair", False) if is_pair is None else is_pair
    if len(names) < 2 or len(set(names)) < len(names):
        raise TaskError(f"label_names must be at least two different labels, got {list(names)}.")
    words = clean_words(task, names, label_words)
    answers = backbone.answers([words[each] for each in names])
    backbone.room_for_text(len(rows), answers.longest)
    head = _head(path, tensors, backbone, len(names)) if backbone.needs_head else None
    card = TaskCard(task, names, words, metric, is_pair, ours.get("description", ""))
    facts = {**ours.get("scores", {}), "rows": len(rows), "imported_from": path.name}
    return Snapshot(card, rows.to(backbone.lane_dtype), head, facts)


def _check_kind(path: Path, config: Mapping[str, Any], backbone: Backbone) -> None:
    if config.get("peft_type") != "PROMPT_TUNING":
        raise ExportError(
            f"{path} is a PEFT adapter of type {config.get('peft_type')!r}; only PROMPT_TUNING is prompt vectors "
            f"before the text."
        )
    wanted = TASK_TYPES[backbone.family]
    if config.get("task_type") != wanted:
        raise ExportError(
            f"{path} was trained for the task type {config.get('task_type')!r}, and {backbone.name!r} "
            f"({backbone.family}) needs {wanted!r}."
        )
    if backbone.family == "encoder" and backbone.readout != "peft":
        raise ExportError(
            f"{path} was trained with PEFT's layout, and this backbone reads {backbone.readout!r}; load it with "
            f"readout='peft'."
        )
    parts = config.get("num_transformer_submodules")
    if backbone.family == "seq2seq" and parts != 1:
        raise ExportError(
            f"{path} has a prompt for the decoder too (num_transformer_submodules {parts or 2}), and ours go to the "
            f"encoder only; train it with num_transformer_submodules=1."
        )


def _rows(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], backbone: Backbone
) -> Tensor:
    """[rows, d] of the prompt."""
    if PROMPT_KEY not in tensors:
        raise ExportError(
            f"{path / ADAPTER_TENSORS} has no tensor {PROMPT_KEY!r}; is it a prompt-tuning adapter?"
        )
    rows = tensors[PROMPT_KEY]
    wanted = (config.get("num_virtual_tokens"), backbone.embed_dim)
    if tuple(rows.shape) != wanted:
        raise ExportError(
            f"the prompt of {path} has the shape {tuple(rows.shape)}, and its config and {backbone.name!r} ask for "
            f"{wanted}; take the model it was trained on."
        )
    return rows


def _head(path: Path, tensors: Mapping[str, Tensor], backbone: Backbone, labels: int) -> Head:
    shapes = {"weight": (labels, backbone.hidden_dim), "bias": (labels,)}
    found = {part: tensors.get(key) for part, key in HEAD_KEYS.items()}
    for part, shape in shapes.items():
        tensor = found[part]
        if tensor is None or tuple(tensor.shape) != shape:
            got = "is not there" if tensor is None else f"has the shape {tuple(tensor.shape)}"
            raise ExportError(
                f"{path}: {HEAD_KEYS[part]} {got}, and {labels} labels on {backbone.name!r} need {shape}; "
                f"give as many label_names as its classifier has."
            )
    return Head(**{part: t.to(backbone.lane_dtype) for part, t in found.items() if t is not None})


def _check_weights(path: Path, ours: Mapping[str, Any], backbone: Backbone) -> None:
    expected = ours.get("backbone", {}).get("fingerprint")
    if expected is not None and expected != backbone.fingerprint():
        raise ExportError(
            f"{path} was made for {ours['backbone']['name']!r} (fingerprint {expected[:12]}…), and {backbone.name!r} "
            f"has other weights ({backbone.fingerprint()[:12]}…). Load the model it was made for."
        )


def _read_json(file: Path, rule: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExportError(f"there is no {file}; {rule}. Check the path.") from None
    except (OSError, ValueError) as error:
        raise ExportError(f"{file} cannot be read ({error}); restore it from a copy.") from None
    if not isinstance(found, dict):
        raise ExportError(f"{file} is damaged (not a JSON object); restore it from a copy.")
    return found


def _read_tensors(path: Path) -> dict[str, Tensor]:
    file = path / ADAPTER_TENSORS
    if not file.is_file():
        raise ExportError(
            f"there is no {file}; older adapters are pickles, which are not read: save it again with PEFT."
        )
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{file} is damaged ({error}); restore it from a copy.") from None
