"""Tasks for other programs: PEFT adapters, and prompt vectors for engines that take embeddings.

    adapter_config.json, adapter_model.safetensors   what `PeftModel.from_pretrained` reads; written without PEFT
    prompt.safetensors                               prompt vectors [rows, d], and an encoder's head
    task.json                                        labels, their words and tokens, scores, for programs
    README.md                                        the same for people: a model card

What a format cannot hold is refused with the reason, before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save as save_tensors
from torch import Tensor

from qtuning import __version__
from qtuning.backbones import Backbone
from qtuning.backbones.sources import SOURCES, hub_id
from qtuning.cards import render_card
from qtuning.errors import ConfigError, ExportError, TaskError, unknown
from qtuning.files import write_atomic
from qtuning.snapshots import Snapshot, answers_from_snapshots

if TYPE_CHECKING:
    from qtuning.tuner import QTuner

TASK_TYPES = {"encoder": "SEQ_CLS", "causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
"""What PEFT calls the families."""
AUTO = {
    "encoder": "AutoModelForSequenceClassification",
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
FORMAT = 1
"""Of `task.json`."""
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
PROMPT_TENSORS, TASK_FILE, CARD = "prompt.safetensors", "task.json", "README.md"
PROMPT_KEY = "prompt_embeddings"
HEAD_KEYS = {"weight": "base_model.classifier.weight", "bias": "base_model.classifier.bias"}
"""PEFT's names of tensors."""

Files = dict[str, bytes]


def export_peft(tuner: QTuner, task: str, folder: str | PathLike[str]) -> Path:
    """Write one task as a PEFT adapter, for `PeftModel.from_pretrained(model, folder)`; PEFT is not needed for it.

    Args:
        tuner: An open collection.
        task: Which of its tasks.
        folder: New or empty.

    Raises:
        ExportError: When the format cannot hold the task.
    """
    return export(tuner, [task], folder, to="peft")


def export_embeddings(tuner: QTuner, task: str, folder: str | PathLike[str]) -> Path:
    """Write one task's prompt vectors, for engines that take `inputs_embeds` or `prompt_embeds`.

    Args:
        tuner: An open collection.
        task: Which of its tasks.
        folder: New or empty.

    Raises:
        ExportError: When the task is not one prompt on the frozen model.
    """
    return export(tuner, [task], folder, to="embeddings")


def export(
    tuner: QTuner,
    tasks: Sequence[str] | None,
    folder: str | PathLike[str],
    *,
    to: str = "peft",
) -> Path:
    """Write tasks in a format of `FORMATS`; all of them, a folder each with an index, where `tasks` is None."""
    path = Path(folder)
    if to not in FORMATS:
        raise ConfigError(unknown("export format", to, FORMATS))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ExportError(f"{path} is not an empty folder; choose another one.")
    names = list(tuner.tasks) if tasks is None else list(tasks)
    if not names:
        raise ExportError("the collection has no tasks to export; teach it one first (learn).")
    snapshots = {name: exportable(tuner, name) for name in names}
    made = {name: FORMATS[to](tuner, snapshot) for name, snapshot in snapshots.items()}
    for name, files in made.items():
        for file, data in files.items():
            write_atomic((path if tasks is not None else path / name) / file, data)
    if tasks is None:
        model = tuner.backbone.name
        card = render_card(
            "index_card.md.j2", tasks=snapshots, name=model, base=hub_id(model), to=to
        )
        write_atomic(path / CARD, card.encode())
    return path


def exportable(tuner: QTuner, task: str) -> Snapshot:
    """The snapshot of a task that is one prompt on the frozen model; others are refused."""
    if task not in tuner.state.snapshots:
        raise TaskError(unknown("task", task, tuner.state.snapshots))
    snapshot: Snapshot = tuner.state.snapshots[task]
    why = ""
    if not answers_from_snapshots(tuner.state) or snapshot.weights:
        why = "answers with weights of its own, or with a prompt that goes on changing"
    elif not len(snapshot.rows):
        why = "learns no prompt vectors"
    if why:
        raise ExportError(
            f"task {task!r} cannot be exported: method {tuner.method_name!r} {why}, and an export is one prompt on "
            f"the frozen model. Learn it with q-tuning or per-task-prompt."
        )
    return snapshot


def _as_peft(tuner: QTuner, snapshot: Snapshot) -> Files:
    backbone, rows = tuner.backbone, snapshot.rows
    if backbone.family == "encoder" and backbone.readout != "peft":
        raise ExportError(
            f"task {snapshot.card.name!r} cannot be exported to PEFT: PEFT puts the prompt before [CLS] and its "
            f"classifier reads the first prompt vector through the pooler, and this collection has the usual layout "
            f"([CLS], prompt, text; readout {backbone.readout!r}). Learn it in PEFT's layout (readout='peft', "
            f"qtuning learn --readout peft), or export embeddings."
        )
    config = {
        "peft_type": "PROMPT_TUNING",
        "task_type": TASK_TYPES[backbone.family],
        "base_model_name_or_path": hub_id(backbone.name) or backbone.name,
        "num_virtual_tokens": len(rows),
        "token_dim": backbone.embed_dim,
        "num_transformer_submodules": 1,  # for T5 too: the prompt goes to the encoder only
        "num_attention_heads": getattr(backbone.model.config, "num_attention_heads", None),
        "num_layers": getattr(backbone.model.config, "num_hidden_layers", None),
        "prompt_tuning_init": "RANDOM",
        "prompt_tuning_init_text": None,
        "tokenizer_name_or_path": None,
        "inference_mode": True,
        "revision": None,
    }
    tensors = {PROMPT_KEY: rows}
    if snapshot.head:
        tensors |= {key: getattr(snapshot.head, part) for part, key in HEAD_KEYS.items()}
    return {
        ADAPTER_CONFIG: _json(config),
        ADAPTER_TENSORS: _tensor_bytes(tensors),
        **_described(tuner, snapshot, {}, "peft"),
    }


def _as_embeddings(tuner: QTuner, snapshot: Snapshot) -> Files:
    kept = {
        key: t for key, t in snapshot.tensors().items() if key.split(".")[0] in ("rows", "head")
    }
    backbone = tuner.backbone
    extra = {
        "prompt": {
            "file": PROMPT_TENSORS,
            "shape": list(snapshot.rows.shape),
            "tokens_before_it": backbone.prompt_at,
        },
        "how": _how(backbone),
    }
    return {PROMPT_TENSORS: _tensor_bytes(kept), **_described(tuner, snapshot, extra, "embeddings")}


FORMATS: dict[str, Callable[[QTuner, Snapshot], Files]] = {
    "peft": _as_peft,
    "embeddings": _as_embeddings,
}


def _how(backbone: Backbone) -> list[str]:
    """What an engine must do, step by step."""
    table = "Look the tokens up with `model.get_input_embeddings()`, and cast the prompt's rows to their number type."
    if backbone.family == "causal":
        return [
            "Tokenise the text (no end token), append `question_tokens`.",
            table,
            "Put the rows before them, contiguously; positions count from the first row. Pass that as `inputs_embeds` "
            "(transformers), or as `prompt_embeds` (vLLM, started with `--enable-prompt-embeds`).",
            "Label scores: the log-probabilities of each label's `label_tokens` after it, summed, then softmax.",
        ]
    if backbone.family == "seq2seq":
        return [
            "Tokenise the text as the tokenizer does, end token included.",
            table,
            "Put the rows before them, and pass that to the encoder as `inputs_embeds`; the decoder gets no prompt.",
            "Label scores: the log-probabilities of each label's `label_tokens` in the decoder, summed, then softmax.",
        ]
    place = "before [CLS]" if backbone.prompt_at == 0 else "after [CLS], before the text"
    read = {
        "mean": "the mean of the last hidden states of [CLS] and text, without those of the rows",
        "cls": "the last hidden state of [CLS]",
        "peft": "the pooler's output",
    }[backbone.readout]
    return [
        "Tokenise the text as the tokenizer does, [CLS] and [SEP] included.",
        table,
        f"Put the rows {place}, and pass that as `inputs_embeds`; segment ids of the rows are 0.",
        f"Label scores: softmax of `head.weight` times {read}, plus `head.bias`.",
    ]


def _described(tuner: QTuner, snapshot: Snapshot, extra: Mapping[str, Any], to: str) -> Files:
    """`task.json` and the model card."""
    about = {**_about(tuner, snapshot), **extra}
    name, backbone = about["backbone"]["name"], tuner.backbone
    labels: Any = about["labels"]
    if about["label_tokens"] is not None:
        labels = dict(zip(labels, about["label_tokens"], strict=True))
    card = render_card(
        "task_card.md.j2",
        about=about,
        to=to,
        rows=len(snapshot.rows),
        auto=AUTO[backbone.family],
        base=hub_id(name),
        labels=repr(labels),
        between_pair=repr(backbone.between_pair),
        question=repr(backbone.question),
        is_unpacked=name in SOURCES and SOURCES[name].unpack is not None,
    )
    return {TASK_FILE: _json(about), CARD: card.encode()}


def _about(tuner: QTuner, snapshot: Snapshot) -> dict[str, Any]:
    """What a program needs to use the task, and people to judge it."""
    backbone, card = tuner.backbone, snapshot.card
    words = [card.label_words[name] for name in card.label_names]
    answers = backbone.answers(words)
    question: list[int] = []
    if backbone.question:
        question = backbone.tokenizer(backbone.question, add_special_tokens=False)["input_ids"]
    scores = ("validation_score", "test_score", "split")
    return {
        "format": FORMAT,
        "qtuning": __version__,
        "task": card.name,
        "description": card.description,
        "labels": list(card.label_names),
        "label_words": words,
        "label_tokens": None if backbone.needs_head else [list(s) for s in answers.sequences],
        "is_pair": card.is_pair,
        "between_pair": backbone.between_pair,
        "question": backbone.question,
        "question_tokens": question,
        "most_text_tokens": backbone.room_for_text(len(snapshot.rows), answers.longest)
        - len(question),
        "metric": card.metric,
        "scores": {key: snapshot.facts[key] for key in scores if key in snapshot.facts},
        "method": tuner.method_name,
        "backbone": {
            "name": backbone.name,
            "family": backbone.family,
            "fingerprint": backbone.fingerprint(),
            "readout": backbone.readout,
            "dtype": str(backbone.dtype).removeprefix("torch."),
            "max_length": backbone.max_length,
        },
    }


def _tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    return save_tensors({key: tensor.contiguous() for key, tensor in tensors.items()})


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
