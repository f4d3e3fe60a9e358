"""Frozen language models in three families, found from their config.

`encoder` (BERT, RoBERTa, …), `causal` (GPT-2, Llama, …), `seq2seq` (T5, BART, …).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError

from qtuning.backbones.answers import AnswerSet
from qtuning.backbones.base import Backbone, Head
from qtuning.backbones.reading import Reading, Row, Tokens
from qtuning.backbones.sources import SOURCES, how_to_get, resolve
from qtuning.errors import BackboneError, ConfigError, QTuningError, unknown

__all__ = ["DTYPES", "READOUTS", "SOURCES", "AnswerSet", "Backbone", "Head", "Reading", "Row", "Tokens",
           "load_backbone", "weights_sha256", "wrap_model"]  # fmt: skip

FAMILIES = {
    "encoder": ("AutoModel", "qtuning.backbones.encoder:EncoderBackbone"),
    "causal": ("AutoModelForCausalLM", "qtuning.backbones.causal:CausalBackbone"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "qtuning.backbones.seq2seq:Seq2SeqBackbone"),
}
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
DEVICES = ("cpu", "cuda", "mps")
"""What an error names; any other that torch knows will do."""
COMPILE = ("auto", "on", "dynamic", "off")
READOUTS = ("mean", "cls", "peft")
DEFAULT_MAX_LENGTH = 512


def load_backbone(
    name: str,
    *,
    dtype: str = "fp32",
    device: str | None = None,
    readout: str = "mean",
    max_length: int | None = None,
    attention: str | None = None,
    compile: str = "auto",
    lanes: int | None = None,
    trust_remote_code: bool = False,
) -> Backbone:
    """A frozen model by short name, hub id or local folder.

    Args:
        name: `minilm`, `bge-small`, `smollm2-135m`, or anything `from_pretrained` takes.
        dtype: `fp32` or `bf16`; `fp16` is refused for T5.
        device: `cpu`, `cuda`, …; a GPU if there is one by default.
        readout: What an encoder's head reads: `mean` over [CLS] and text, or `cls`; `peft` is the layout of PEFT,
            which puts the prompt before [CLS] and reads the pooler: choose it to export adapters.
        max_length: Positions of prompt, text and answer; by default the model's own, 512 at most.
        attention: Attention implementation for `from_pretrained`; its own default otherwise.
        compile: `auto` compiles on a GPU when there is enough work ahead to repay it; `on`; `off`.
        lanes: Runs that share a pass at most; by default as many as there are, or as fit a GPU's memory.
        trust_remote_code: Run code that comes with the model. Off unless asked for.
    """
    from transformers import AutoConfig, AutoTokenizer

    if dtype not in DTYPES:
        raise ConfigError(unknown("dtype", dtype, DTYPES))
    if compile not in COMPILE:
        raise ConfigError(unknown("compile mode", compile, COMPILE))
    if lanes is not None and lanes < 1:
        raise ConfigError(f"lanes must be at least 1, got {lanes}.")
    if device is not None:
        _check_device(device)
    options = {"trust_remote_code": trust_remote_code}
    with _quiet():
        try:
            folder = resolve(name)
            config = AutoConfig.from_pretrained(folder, **options)
            family = find_family(config)
            _refuse_half_t5(config, DTYPES[dtype])
            auto = getattr(importlib.import_module("transformers"), FAMILIES[family][0])
            attention_option = {"attn_implementation": attention} if attention else {}
            model, loaded = auto.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                output_loading_info=True,
                **attention_option,
                **options,
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        except (OSError, ValueError, SafetensorError) as error:
            if isinstance(error, QTuningError):
                raise
            first = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise BackboneError(
                f"cannot load the model {name!r}: {first} {how_to_get(name)}"
            ) from error
    _drop_drawn_pooler(model, loaded["missing_keys"])
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    backbone = wrap_model(model, tokenizer, name=name, readout=readout, max_length=max_length)
    backbone.compile, backbone.at_once = compile, lanes
    return backbone


def wrap_model(
    model: Any,
    tokenizer: Any,
    *,
    name: str = "model",
    readout: str = "mean",
    max_length: int | None = None,
) -> Backbone:
    """A backbone from a model and tokenizer you already have; its weights are frozen, not copied."""
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise BackboneError(
            f"cannot load the model {name!r}: its tokenizer is empty. {how_to_get(name)}"
        )
    if max_length is not None and (not isinstance(max_length, int) or isinstance(max_length, bool)):
        raise ConfigError(f"max_length must be a whole number, got {max_length!r}.")
    if readout not in READOUTS:
        raise ConfigError(unknown("readout", readout, READOUTS))
    _refuse_half_t5(model.config, model.dtype)
    positions = _positions(model.config)
    if max_length is not None and max_length < 8:
        raise ConfigError(f"max_length must be at least 8, got {max_length}.")
    if max_length is not None and positions is not None and max_length > positions:
        raise ConfigError(
            f"max_length must be at most {positions}, the positions of {name!r}; got {max_length}."
        )
    length = max_length or min(positions or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    family = find_family(model.config)
    if readout == "peft" and family != "encoder":
        raise ConfigError(
            f"readout 'peft' is a layout for encoders, and {name!r} is of the {family} family, whose usual "
            f"layout is PEFT's already; leave readout out."
        )
    module, cls = FAMILIES[family][1].split(":")
    backbone: Backbone = getattr(importlib.import_module(module), cls)(
        model, tokenizer, name, length, readout
    )
    return backbone


def find_family(config: Any) -> str:
    """`encoder`, `causal` or `seq2seq`, from a model's config."""
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        if kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
            return "seq2seq"
    elif kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_decoder", False
    ):
        return "encoder"
    elif kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "causal"
    raise BackboneError(
        f"model type {kind!r} is neither a text encoder, a causal model nor a text-to-text model; "
        f"use one such as BERT, GPT-2, Llama, T5 or BART."
    )


def weights_sha256(backbone: Backbone) -> str:
    """sha256 over every weight and buffer: proof that a frozen model stayed as it was."""
    digest = hashlib.sha256()
    for name, tensor in sorted(backbone.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def _drop_drawn_pooler(model: Any, missing: Iterable[str]) -> None:
    """Take out a pooler that the files do not hold: it would be drawn anew, and be another model, at every load."""
    takes_none = "add_pooling_layer" in inspect.signature(type(model).__init__).parameters
    if takes_none and any(name.startswith("pooler.") for name in missing):
        model.pooler = None


def _positions(config: Any) -> int | None:
    """Positions the model was built for; None where distances are relative (T5)."""
    if hasattr(config, "relative_attention_num_buckets"):
        return None
    found = getattr(config, "max_position_embeddings", None)
    if found is None:
        return None
    padded = config.model_type in ("roberta", "xlm-roberta", "camembert", "longformer")
    return int(found) - (config.pad_token_id + 1 if padded else 0)


def _refuse_half_t5(config: Any, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and config.model_type in ("t5", "mt5", "umt5", "longt5"):
        raise ConfigError(
            "dtype must be fp32 or bf16 for T5 models, got 'fp16': their activations overflow in half precision."
        )


def _check_device(device: str) -> None:
    try:
        torch.device(device)
    except RuntimeError:
        raise ConfigError(unknown("device", device, DEVICES)) from None
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].split(". ")[0][:200].rstrip(".")
        raise ConfigError(
            f"device {device!r} cannot be used: {reason}. Use device 'cpu'."
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and load reports of transformers while a model is read."""
    from transformers.utils import logging as chatter

    level, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    hub.setLevel(logging.ERROR)  # else every retry of an unreachable hub is a line
    try:
        yield
    finally:
        chatter.set_verbosity(level)
        hub.setLevel(hub_level)
        if bars:
            chatter.enable_progress_bar()
