"""BERT-like backbones: [CLS], prompt vectors, text; one linear head per task.

With `readout="peft"` the layout is the one PEFT gives a BERT classifier: prompt vectors first, then [CLS] and text;
the head reads the pooler, which looks at the first position, a prompt vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtuning.backbones.answers import AnswerSet
from qtuning.backbones.base import Backbone, Head
from qtuning.backbones.products import QUICK
from qtuning.backbones.reading import Batch, Reading
from qtuning.errors import BackboneError, ConfigError
from qtuning.tasks import Text

POOLED = ("bert",)
"""Models whose sequence classifier is the pooler and one linear layer; others read by layers of their own."""


@dataclass
class EncoderBackbone(Backbone):
    """Reads the state of [CLS], the mean over [CLS] and text without prompt vectors, or PEFT's pooler."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.family = "encoder"
        self.needs_head = True
        self.prompt_at = 1  # [CLS] keeps position 0 (A28)
        segments = getattr(self.model.config, "type_vocab_size", 1)
        self._uses_types = segments > 1 and "token_type_ids" in self.tokenizer.model_input_names
        if self.tokenizer.cls_token_id is None:
            raise BackboneError(f"{self.name!r}: its tokenizer has no [CLS] token to read from.")
        if self.readout == "peft":
            self._check_pooler()
            self.prompt_at = 0

    def _check_pooler(self) -> None:
        kind = self.model.config.model_type
        if kind not in POOLED:
            raise ConfigError(
                f"readout 'peft' needs a model of type {', '.join(POOLED)}, got {kind!r} ({self.name!r}): "
                f"its sequence classifier has a head of another kind. Use readout 'mean' or 'cls'."
            )
        if getattr(self.model, "pooler", None) is None:
            raise BackboneError(
                f"readout 'peft' reads the pooler, and {self.name!r} has no pooler in its weights. "
                f"Use readout 'mean' or 'cls', or another model."
            )

    def answers(self, label_words: Sequence[str]) -> AnswerSet:
        """A class index for each label, as a sequence of one."""
        return AnswerSet.build([(i,) for i in range(len(label_words))])

    def _parts(self, text: Text) -> tuple[str, ...]:
        return text if isinstance(text, tuple) else (text,)

    def hidden(self, reading: Reading, bank: Tensor) -> Tensor:
        """[n, 1, h]: one read-out per row."""
        batch = self.assemble(reading, bank)
        if self.readout == "peft":
            pooled: Tensor = self._read(batch).pooler_output
            return pooled[:, None]
        return self.feature(batch)[:, None]

    def feature(self, batch: Batch) -> Tensor:
        """[b, h]: the state of [CLS], or the mean."""
        return self.states(batch)[:, 0] if self.readout == "cls" else super().feature(batch)

    def text_states(self, batch: Batch) -> Tensor:
        """[b, s, h]."""
        states: Tensor = self._read(batch).last_hidden_state
        return states

    def _read(self, batch: Batch) -> Any:
        extra = {"token_type_ids": batch.token_types} if self._uses_types else {}
        mask = self.mask(batch.is_filled)
        is_training = torch.is_grad_enabled() and self.device.type == "cpu"
        with self.attending(QUICK) if is_training and self.takes_ready_mask else nullcontext():
            return self.model(inputs_embeds=batch.inputs_embeds, attention_mask=mask, **extra)

    def logits(self, hidden: Tensor, head: Head | None) -> Tensor:
        """[..., n, 1, h] -> [..., n, 1, classes]; heads may be stacked along the leading dimensions."""
        if head is None:
            raise BackboneError("an encoder needs the task's head to answer.")
        found = torch.einsum("...nth,...kh->...ntk", hidden.to(head.weight), head.weight)
        return found + head.bias[..., None, None, :]
