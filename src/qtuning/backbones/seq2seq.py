"""T5-like backbones: prompt vectors and text into the encoder, label words from the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtuning.backbones.answers import TokenIds
from qtuning.backbones.base import (
    Row,
    Tokens,
    VocabularyBackbone,
    gather_positions,
    readout_positions,
)
from qtuning.tasks import Text


@dataclass
class Seq2SeqBackbone(VocabularyBackbone):
    """The prompt goes to the encoder only; the encoder runs once for all label words."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.family = "seq2seq"

    def _answer_tokens(self, label_words: Sequence[str]) -> list[TokenIds]:
        """Each label as the tokenizer writes a target, end token included."""
        coded = self.tokenizer(text_target=list(label_words))
        return [tuple(ids) for ids in coded["input_ids"]]

    def _tokens_of(self, text: Text, room: int) -> Tokens:
        whole = " ".join(text) if isinstance(text, tuple) else text
        return Tokens(tuple(self.tokenizer(whole, truncation=True, max_length=room)["input_ids"]))

    def hidden(self, rows: Sequence[Row], bank: Tensor) -> Tensor:
        """[sum of paths, t, h]: states of the decoder."""
        batch = self.assemble(rows, bank)
        encoded: Tensor = self.model.get_encoder()(
            inputs_embeds=batch.inputs_embeds, attention_mask=batch.attention_mask
        ).last_hidden_state
        owners = [i for i, row in enumerate(rows) for _ in row.paths]
        if len(owners) > len(rows):
            index = torch.tensor(owners, device=encoded.device)
            encoded, mask = encoded[index], batch.attention_mask[index]
        else:
            mask = batch.attention_mask
        positions = readout_positions(rows, [0] * len(owners))
        return gather_positions(self._decode(rows, encoded, mask), positions)

    def _decode(self, rows: Sequence[Row], encoded: Tensor, mask: Tensor) -> Tensor:
        start = self.model.config.decoder_start_token_id
        paths = [(start, *path) for row in rows for path in row.paths]
        longest = max(len(path) for path in paths)
        ids = torch.tensor([[*path, *[self.pad_id] * (longest - len(path))] for path in paths])
        read = torch.arange(longest) < torch.tensor([len(path) for path in paths])[:, None]
        states: Tensor = self.model.get_decoder()(
            input_ids=ids.to(self.device),
            attention_mask=read.long().to(self.device),
            encoder_hidden_states=encoded,
            encoder_attention_mask=mask,
            use_cache=False,
        ).last_hidden_state
        return states

    def _reference_logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
        encoded = self.model.get_encoder()(input_ids=ids).last_hidden_state
        decoder = self.model.get_decoder()
        states = decoder(input_ids=ids, encoder_hidden_states=encoded, use_cache=False)
        return logits, states.last_hidden_state
