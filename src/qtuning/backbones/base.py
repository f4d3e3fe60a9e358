"""What every backbone family shares: texts to tokens, rows to one padded batch, the frozen model.

The model object stays what `from_pretrained` returned. Prompt vectors enter through
`inputs_embeds`; every sequence is contiguous and padded once, on the right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qtuning.backbones.answers import AnswerSet, TokenIds
from qtuning.errors import BackboneError, ConfigError
from qtuning.tasks import Text

MIN_TEXT_TOKENS = 4
"""Fewer tokens than this left for the text, special ones included, is refused."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One text as token ids; `types` are segment ids, empty where the model has none."""

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One example of a batch: which rows of the bank stand before its text, and what it is to answer.

    `paths` are token sequences to read after the text (see `AnswerSet`); a path of n tokens gives
    n + 1 read-outs. An encoder has one empty path.
    """

    tokens: Tokens
    bank_start: int
    bank_rows: int
    paths: tuple[TokenIds, ...] = ((),)


@dataclass(frozen=True)
class Batch:
    """Rows as tensors, padded on the right: [b, s, d] embeddings and [b, s] masks."""

    inputs_embeds: Tensor
    attention_mask: Tensor
    text_mask: Tensor
    """1 where a token of the text stands, 0 on prompt vectors and padding."""
    token_types: Tensor
    lengths: list[int]
    """Positions of each row before its path begins."""


@dataclass(frozen=True)
class Head:
    """A linear classifier of one task on an encoder: weight [k, h], bias [k]."""

    weight: Tensor
    bias: Tensor

    def detached(self) -> Head:
        """The same numbers without a gradient."""
        return Head(self.weight.detach(), self.bias.detach())


@dataclass
class Backbone:
    """A frozen language model. Subclasses say how it reads rows and how it answers."""

    model: Any
    tokenizer: Any
    name: str
    max_length: int
    """Positions of prompt and text, and of the answer where it follows them."""
    readout: str = "mean"
    prompt_at: int = field(default=0, init=False)
    """Tokens of the text that stand before the prompt vectors."""
    family: str = field(default="", init=False)
    needs_head: bool = field(default=False, init=False)
    answer_follows_text: bool = field(default=False, init=False)
    """Whether the answer stands in the same sequence and takes room from the text."""

    def __post_init__(self) -> None:
        self.model.requires_grad_(False)
        self.model.eval()  # no dropout, or lanes of a pack would depend on each other (A34)
        self.embedding = self.model.get_input_embeddings()
        self.embed_dim = int(self.embed(torch.zeros(1, dtype=torch.long)).shape[-1])
        if self.tokenizer.pad_token_id is None:
            self.pad_id = 0  # masked everywhere; any id will do
        else:
            self.pad_id = int(self.tokenizer.pad_token_id)

    # ── the model's facts ────────────────────────────────────────────────────────────────────

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' number type."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def lane_dtype(self) -> torch.dtype:
        """Number type of prompts, scales, heads and optimiser state: float32, or float64 in tests."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def hidden_dim(self) -> int:
        """Width of the read-outs."""
        return int(self.model.config.hidden_size)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] -> embeddings [..., d], as the model itself would look them up."""
        with torch.no_grad():
            out: Tensor = self.embedding(ids.to(self.device))
        return out

    def vocabulary(self) -> list[int]:
        """Ids from which prompts are initialised: all tokens but the special ones."""
        special = set(self.tokenizer.all_special_ids)
        size = min(len(self.tokenizer), self.embedding.num_embeddings)
        return [i for i in range(size) if i not in special]

    def fingerprint(self) -> str:
        """A short hash of config shape and a sample of every weight, equal for float32 and bfloat16."""
        digest = hashlib.sha256(f"{self.family} {self.embed_dim} {len(self.tokenizer)}".encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // 1024)][:1024].to("cpu", torch.bfloat16)
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:32]

    # ── texts to tokens ──────────────────────────────────────────────────────────────────────

    def answers(self, label_words: Sequence[str]) -> AnswerSet:
        """Token sequences of the labels; an encoder has none, only a class index each."""
        raise NotImplementedError

    def tokenize(
        self, texts: Sequence[Text], prompt_rows: int, answer_tokens: int = 0
    ) -> list[Tokens]:
        """Tokens of each text, cut so that prompt, text and answer fit the model's positions."""
        room = self.room_for_text(prompt_rows, answer_tokens)
        return [self._tokens_of(text, room) for text in texts]

    def room_for_text(self, prompt_rows: int, answer_tokens: int = 0) -> int:
        """Positions left for the text; refused when there are next to none."""
        room = self.max_length - prompt_rows - (answer_tokens if self.answer_follows_text else 0)
        if room < self._fewest_tokens():
            raise ConfigError(
                f"{prompt_rows} prompt vectors leave {max(room, 0)} of the {self.max_length} positions of "
                f"{self.name!r} for the text. Lower queue_size, prompt_length or shared_length."
            )
        return room

    def _tokens_of(self, text: Text, room: int) -> Tokens:
        raise NotImplementedError

    def _fewest_tokens(self) -> int:
        return MIN_TEXT_TOKENS

    # ── rows to read-outs ────────────────────────────────────────────────────────────────────

    def hidden(self, rows: Sequence[Row], bank: Tensor) -> Tensor:
        """Read-outs [sum of paths, t, h]: last hidden states where the rows answer.

        `bank` [rows, d] holds the prompt vectors of every lane; each row names its slice of it.
        """
        raise NotImplementedError

    def closed(self, sequence: TokenIds) -> TokenIds:
        """A label's tokens as generation would write them to the end."""
        return sequence

    def logits(self, hidden: Tensor, head: Head | None) -> Tensor:
        """[n, t, h] -> [n, t, v]: classes of the task's head, or the whole vocabulary. float32 or float64."""
        raise NotImplementedError

    def assemble(self, rows: Sequence[Row], bank: Tensor, tails: Sequence[TokenIds] = ()) -> Batch:
        """One padded batch: text before the slot, prompt vectors, text after it, then the tail."""
        at = self.prompt_at
        lengths = [len(row.tokens.ids) + row.bank_rows for row in rows]
        tails = tails or [()] * len(rows)
        totals = [length + len(tail) for length, tail in zip(lengths, tails, strict=True)]
        shape = (len(rows), max(totals))
        ids = np.full(shape, self.pad_id, dtype=np.int64)
        slots = np.full(shape, -1, dtype=np.int64)
        types = np.zeros(shape, dtype=np.int64)
        for i, (row, tail) in enumerate(zip(rows, tails, strict=True)):
            first = at + row.bank_rows
            ids[i, :at] = row.tokens.ids[:at]
            ids[i, first : lengths[i]] = row.tokens.ids[at:]
            ids[i, lengths[i] : totals[i]] = tail
            slots[i, at:first] = np.arange(row.bank_start, row.bank_start + row.bank_rows)
            if row.tokens.types:
                types[i, first : lengths[i]] = row.tokens.types[at:]
        device = self.device
        filled = torch.arange(shape[1]) < torch.tensor(totals)[:, None]
        where = torch.from_numpy(slots >= 0)
        embeds = self.embed(torch.from_numpy(ids))
        if where.any():
            # an embedding look-up, because its gradient is summed in a fixed order on every device
            places = torch.from_numpy(slots).clamp(min=0).to(bank.device)
            vectors = F.embedding(places, bank).to(embeds)
            embeds = torch.where(where.to(device)[..., None], vectors, embeds)
        return Batch(
            inputs_embeds=embeds,
            attention_mask=filled.long().to(device),
            text_mask=(filled & ~where).to(device),
            token_types=torch.from_numpy(types).to(device),
            lengths=lengths,
        )


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
        self._output_scale, self._output_bias = self._find_output_rule()

    @property
    def hidden_dim(self) -> int:
        """Width of the read-outs: what the language-model head takes."""
        return int(self.lm_head.weight.shape[1])

    def logits(self, hidden: Tensor, head: Head | None) -> Tensor:
        """[n, t, h] -> [n, t, vocabulary]."""
        out: Tensor = self.lm_head((hidden * self._output_scale).to(self.dtype))
        if self._output_bias is not None:
            out = out + self._output_bias
        return out.to(self.lane_dtype)

    def answers(self, label_words: Sequence[str]) -> AnswerSet:
        """Token sequences of the labels, all different."""
        sequences = self._answer_tokens(label_words)
        if len(set(sequences)) < len(sequences):
            raise BackboneError(
                f"{self.name!r} cannot tell the label words {list(label_words)} apart; choose others."
            )
        return AnswerSet.build(sequences)

    def _answer_tokens(self, label_words: Sequence[str]) -> list[TokenIds]:
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


def readout_positions(rows: Sequence[Row], starts: Sequence[int]) -> Tensor:
    """Where each path is read, [sum of paths, t]; past a path's end the last place is repeated.

    `starts` is the first read-out of each path.
    """
    paths = [path for row in rows for path in row.paths]
    longest = max(len(path) for path in paths)
    steps = torch.arange(longest + 1)
    last = torch.tensor([len(path) for path in paths])
    return torch.tensor(list(starts))[:, None] + torch.minimum(steps[None], last[:, None])


def gather_positions(states: Tensor, positions: Tensor) -> Tensor:
    """States [b, s, h] at positions [b, t] -> [b, t, h]."""
    index = positions.to(states.device)[..., None].expand(-1, -1, states.shape[-1])
    return states.gather(1, index)
