"""T5-like backbones: prompt vectors and text into the encoder, label words from the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qtuning.backbones.answers import TokenIds
from qtuning.backbones.base import MASKED
from qtuning.backbones.reading import Batch, Reading, gather_reads
from qtuning.backbones.t5 import MODEL_TYPES, T5Layers
from qtuning.backbones.vocabulary import VocabularyBackbone


@dataclass
class Seq2SeqBackbone(VocabularyBackbone):
    """The prompt goes to the encoder only; the encoder runs once for all label words."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.family = "seq2seq"
        self.between_pair = " "
        is_t5 = self.model.config.model_type in MODEL_TYPES
        self.t5 = T5Layers(self.model) if is_t5 else None

    def answer_tokens(self, label_words: Sequence[str]) -> list[TokenIds]:
        """Each label as the tokenizer writes a target, end token included."""
        coded = self.tokenizer(text_target=list(label_words))
        return [tuple(ids) for ids in coded["input_ids"]]

    def hidden(self, reading: Reading, bank: Tensor) -> Tensor:
        """[p, t, h]: states of the decoder; the encoder reads each row once for all its paths."""
        batch = self.assemble(reading, bank)
        filled = batch.is_filled
        encoded = self._encode(batch.inputs_embeds, filled)
        if not reading.is_single and not (self.t5 and reading.is_even):
            encoded, filled = encoded[reading.owner], filled[reading.owner]
        ids = F.pad(reading.path, (1, 0), value=self.model.config.decoder_start_token_id)
        states = self._decode(ids, encoded, filled)
        return gather_reads(states, torch.zeros_like(reading.reads), reading.reads, ids.shape[1])

    def training_layers(self) -> AbstractContextManager[None]:
        """T5's own layers, or those of the model."""
        if self.t5 and self.is_compiled:
            return self.t5.compiled()
        return super().training_layers()

    @property
    def takes_branches(self) -> bool:
        """T5's own layers do; the model's read the encoder's states once for every path."""
        return self.t5 is not None

    def use_plain_layers(self) -> None:
        """T5's too."""
        self.t5 = None

    def text_states(self, batch: Batch) -> Tensor:
        """[b, s, d] of the encoder."""
        return self._encode(batch.inputs_embeds, batch.is_filled)

    def _encode(self, embeds: Tensor, is_filled: Tensor) -> Tensor:
        """[b, s, d] -> [b, s, d]."""
        if self.t5:
            return self.t5.encode(embeds, is_filled)
        states: Tensor = self.model.get_encoder()(
            inputs_embeds=embeds, attention_mask=self.mask(is_filled)
        ).last_hidden_state
        return states

    def _decode(self, ids: Tensor, encoded: Tensor, is_filled: Tensor) -> Tensor:
        """[p, t] after [p or n, s, d] -> [p, t, d]; what pads a path on the right is not seen before it."""
        if self.t5:
            return self.t5.decode(ids, encoded, is_filled)
        count, size = ids.shape
        own = None
        if self.takes_ready_mask:
            later = torch.ones(size, size, device=ids.device).triu(1) * MASKED
            own = later.to(self.dtype).expand(count, 1, -1, -1)
        states: Tensor = self.model.get_decoder()(
            input_ids=ids,
            attention_mask=own,
            encoder_hidden_states=encoded,
            encoder_attention_mask=self.mask(is_filled, size),
            use_cache=False,
        ).last_hidden_state
        return states

    def _reference_logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
        encoded = self.model.get_encoder()(input_ids=ids).last_hidden_state
        decoder = self.model.get_decoder()
        states = decoder(input_ids=ids, encoder_hidden_states=encoded, use_cache=False)
        return logits, states.last_hidden_state
