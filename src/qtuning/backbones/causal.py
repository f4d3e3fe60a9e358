"""GPT-like backbones: prompt vectors, text, label words; read at the end of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from qtuning.backbones.answers import TokenIds
from qtuning.backbones.base import (
    MIN_TEXT_TOKENS,
    Row,
    Tokens,
    VocabularyBackbone,
    gather_positions,
    readout_positions,
)
from qtuning.tasks import Text

QUESTION = "\nAnswer:"
"""Stands between text and label words, so that the model knows where the text ends."""


@dataclass
class CausalBackbone(VocabularyBackbone):
    """Scores label words after the text; the prompt stands before everything, as in PEFT."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.family = "causal"
        self.answer_follows_text = True
        self._question = tuple(self.tokenizer(QUESTION, add_special_tokens=False)["input_ids"])

    def _answer_tokens(self, label_words: Sequence[str]) -> list[TokenIds]:
        """Each label as it follows the question; an end token only where one label begins another."""
        coded = self.tokenizer([f" {word}" for word in label_words], add_special_tokens=False)
        sequences: list[TokenIds] = [tuple(ids) for ids in coded["input_ids"]]
        in_order = sorted(sequences)
        if any(later[: len(earlier)] == earlier for earlier, later in pairwise(in_order)):
            sequences = [self.closed(sequence) for sequence in sequences]
        return sequences

    def closed(self, sequence: TokenIds) -> TokenIds:
        """The sequence with an end token, where the model has one."""
        end = self.tokenizer.eos_token_id
        return sequence if end is None or sequence[-1:] == (end,) else (*sequence, end)

    def _tokens_of(self, text: Text, room: int) -> Tokens:
        whole = "\n".join(text) if isinstance(text, tuple) else text
        body = self.tokenizer(whole, truncation=True, max_length=room - len(self._question))
        ids = tuple(body["input_ids"])
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids = ids[:-1]  # some tokenizers close every text; ours goes on
        return Tokens(ids + self._question)

    def _fewest_tokens(self) -> int:
        return MIN_TEXT_TOKENS + len(self._question)

    def hidden(self, rows: Sequence[Row], bank: Tensor) -> Tensor:
        """[sum of paths, t, h]; a row with several paths is read once for each."""
        single = [replace(row, paths=(path,)) for row in rows for path in row.paths]
        batch = self.assemble(single, bank, [row.paths[0] for row in single])
        states: Tensor = self.model.base_model(
            inputs_embeds=batch.inputs_embeds, attention_mask=batch.attention_mask, use_cache=False
        ).last_hidden_state
        starts = [length - 1 for length in batch.lengths]
        return gather_positions(states, readout_positions(single, starts))

    def _reference_logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return logits, self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
