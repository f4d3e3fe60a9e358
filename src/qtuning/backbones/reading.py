"""What stands between texts and a model: tokens, rows, their tensors, and the padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtuning.backbones.answers import TokenIds
from qtuning.backbones.extents import Extent


@dataclass(frozen=True, slots=True)
class Tokens:
    """One text as token ids; `types` are segment ids, empty where the model has none."""

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One example: which rows of the bank stand before its text, and what it is to answer.

    `paths` are token sequences to read after the text (see `AnswerSet`); a path of n tokens gives
    n + 1 read-outs. An encoder has one empty path.
    """

    tokens: Tokens
    slots: Sequence[int] = ()
    paths: tuple[TokenIds, ...] = ((),)


@dataclass(frozen=True)
class Reading:
    """Rows as tensors on the device: made once, read as often as training or scoring needs.

    n rows with p paths among them; every tensor is padded on the right.
    """

    ids: Tensor
    """[n, w] tokens of the text."""
    types: Tensor
    """[n, w] segment ids."""
    length: Tensor
    """[n] tokens of the text."""
    slots: Tensor
    """[g, r] rows of the bank that make up each of the prompts that rows share."""
    prompt: Tensor
    """[g] how many of the slots count."""
    group: Tensor
    """[n] the prompt that stands before each row."""
    owner: Tensor
    """[p] the row that each path belongs to."""
    path: Tensor
    """[p, t - 1] tokens of each path."""
    reads: Tensor
    """[p] read-outs of each path: its tokens and one."""
    width: int
    """Positions of the longest sequence, or a few more."""
    is_even: bool = True
    """Whether all rows have equally many paths."""
    extent: Extent | None = None
    """Of the line in which all of it is read (see `lines`); None where rows are padded to `width`."""

    @property
    def is_single(self) -> bool:
        """Whether every row has one path."""
        return len(self.owner) == len(self.ids)

    def branch(self) -> Tensor:
        """[p] the number of each path among those of its row, which stand together."""
        place = torch.arange(len(self.owner), device=self.owner.device)
        return place - torch.searchsorted(self.owner, self.owner)

    def expanded(self) -> Reading:
        """The same with a row of its own for every path."""
        return replace(
            self,
            ids=self.ids[self.owner],
            types=self.types[self.owner],
            length=self.length[self.owner],
            group=self.group[self.owner],
            owner=torch.arange(len(self.owner), device=self.owner.device),
            is_even=True,
        )

    def at(self, index: Tensor, width: int) -> Reading:
        """Some rows [m], one path each, in sequences of `width` positions."""
        return Reading(
            self.ids[index],
            self.types[index],
            self.length[index],
            self.slots,
            self.prompt,
            self.group[index],
            torch.arange(len(index), device=index.device),
            self.path[index],
            self.reads[index],
            width,
        )


@dataclass(frozen=True)
class Batch:
    """What a model reads: [b, s, d] embeddings and [b, s] masks, padded on the right."""

    inputs_embeds: Tensor
    is_filled: Tensor
    is_text: Tensor
    """True where a token of the text stands: not on prompt vectors, answers and padding."""
    token_types: Tensor
    end: Tensor
    """[b] positions of prompt and text; the answer begins there."""


def gather_reads(states: Tensor, first: Tensor, reads: Tensor, longest: int) -> Tensor:
    """States [b, s, h] at first, first + 1, … -> [b, longest, h]; past the end the last is repeated."""
    steps = torch.arange(longest, device=states.device)
    positions = first[:, None] + torch.minimum(steps, reads[:, None] - 1)
    return states.gather(1, positions[..., None].expand(-1, -1, states.shape[-1]))
