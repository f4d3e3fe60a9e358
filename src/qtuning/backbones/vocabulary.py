"""Backbones that answer with label words: logits over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtuning.backbones.answers import AnswerSet, TokenIds
from qtuning.backbones.base import Backbone, Head, remembering
from qtuning.errors import BackboneError

REMEMBERED_LABELS = 1_024
"""Sets of label words whose tokens are kept: every task is asked again and again."""


@dataclass
class VocabularyBackbone(Backbone):
    """A backbone that answers with label words: logits over its vocabulary."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lm_head = self.model.get_output_embeddings()
        if self.lm_head is None:
            raise BackboneError(
                f"{self.name!r} has no language-model head to score label words with."
            )
        self.vocabulary_size = int(self.lm_head.weight.shape[0])
        self._output_scale, self._output_bias = self._find_output_rule()
        self._answers = remembering(self._answers_of, REMEMBERED_LABELS)

    @property
    def hidden_dim(self) -> int:
        """Width of the read-outs: what the language-model head takes."""
        return int(self.lm_head.weight.shape[1])

    def logits(self, hidden: Tensor, head: Head | None) -> Tensor:
        """[..., h] -> [..., vocabulary]."""
        out: Tensor = self.lm_head((hidden * self._output_scale).to(self.dtype))
        if self._output_bias is not None:
            out = out + self._output_bias
        return out.to(self.lane_dtype)

    def answers(self, label_words: Sequence[str]) -> AnswerSet:
        """Token sequences of the labels, all different."""
        return self._answers(tuple(label_words))

    def _answers_of(self, label_words: tuple[str, ...]) -> AnswerSet:
        sequences = self.answer_tokens(label_words)
        if len(set(sequences)) < len(sequences):
            raise BackboneError(
                f"{self.name!r} cannot tell the label words {list(label_words)} apart; choose others."
            )
        return AnswerSet.build(sequences)

    def answer_tokens(self, label_words: Sequence[str]) -> list[TokenIds]:
        """Each answer as the model writes it."""
        raise NotImplementedError

    def _find_output_rule(self) -> tuple[float, Tensor | None]:
        """How the model gets from last hidden state to logits, found by comparing with its own forward.

        T5 scales the hidden state, BART adds a bias, most do neither; a model that does something
        else is refused here rather than scored wrongly later.
        """
        ids = torch.arange(3)[None] + 1
        with torch.no_grad():
            expected, hidden = self._reference_logits(ids.to(self.device))
            bias = getattr(self.model, "final_logits_bias", None)
            for scale in (1.0, hidden.shape[-1] ** -0.5):
                found = self.lm_head(hidden * scale)
                found = found if bias is None else found + bias
                if torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-3):
                    return scale, bias
        raise BackboneError(
            f"{self.name!r} turns hidden states into logits in a way this version does not know "
            f"(class {type(self.model).__name__})."
        )

    def _reference_logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own logits for some ids, and its last hidden states."""
        raise NotImplementedError
