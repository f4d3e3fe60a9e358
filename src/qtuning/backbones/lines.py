"""Rows as parts of one line: every prompt is read once for all of its rows, and no position is padding.

Rows of a batch differ in length, and many stand behind the same prompt: the rows of a lane in training, all texts of
a task in scoring. A causal model reads a prompt the same way whatever follows, so here it is a part of its own, before
the texts; each text sees the prompt it belongs to and itself so far, and each of several paths the prompt, its text and
itself. With 8 texts a step and 60 prompt vectors that is 60 positions where padded rows have 480. Gradients of a
prompt's keys and values are summed over the texts that saw them: the numbers are those of rows read one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from qtuning.backbones.attend import attend
from qtuning.backbones.base import Backbone, Reading

LINE = "qtuning-line"
TAKES_LINES = ("llama",)
"""Models that hand what they are given on to their attention, and take positions of ours."""


@dataclass(frozen=True)
class Line:
    """Prompts, then texts, then paths where a text has several; what follows the last is seen by none.

    Made on the device without waiting for it: all sizes are those of the reading's extent.
    """

    starts: Tensor
    """[m + 1] where each part begins, and where the last one ends; int32, as kernels want it."""
    key_starts: Tensor
    """[m + 1] the same among the keys."""
    part: Tensor
    """[positions] the part that a position is in, …"""
    within: Tensor
    """… and which of its positions it is."""
    place: Tensor
    """[positions] the same, counted from the beginning of its prompt."""
    seen: Tensor
    """[keys] positions that each part sees, one part after another: its prompt, its text, itself."""
    owned: Tensor
    """[positions] where among the keys a position is seen by its own part."""
    used: Tensor
    """[prompted, rows of a prompt] where a prompt's positions are seen by its texts; empty without gradients."""

    @classmethod
    def of(cls, reading: Reading, trains: bool) -> Line:
        """Where everything stands; training wants equally many rows for every prompt, with one path each."""
        assert reading.extent is not None
        device = reading.length.device
        prompts, rows = len(reading.prompt), len(reading.length)
        tail = reading.reads - 1
        before_text = reading.prompt[reading.group]
        if reading.is_single:
            lengths = torch.cat([reading.prompt, reading.length + tail])
            before = F.pad(before_text, (prompts, 0))
            root = torch.cat([torch.arange(prompts, device=device), reading.group])
            parent = root
        else:
            texts = prompts + torch.arange(rows, device=device)
            root = torch.cat(
                [torch.arange(prompts, device=device), reading.group, reading.group[reading.owner]]
            )
            parent = torch.cat([root[: prompts + rows], texts[reading.owner]])
            lengths = torch.cat([reading.prompt, reading.length, tail])
            before_path = (before_text + reading.length)[reading.owner]
            before = torch.cat([F.pad(before_text, (prompts, 0)), before_path])
        starts, part, within = _spread(lengths, reading.extent.positions)
        keys = torch.where(lengths > 0, before + lengths, 0)
        key_starts, viewer, step = _spread(keys, reading.extent.keys)
        rooted = reading.prompt[root[viewer]]
        own = starts[viewer] + step - before[viewer]
        in_text = starts[parent[viewer]] + step - rooted
        in_prompt = starts[root[viewer]] + step
        seen = torch.where(
            step >= before[viewer], own, torch.where(step < rooted, in_prompt, in_text)
        )
        owned = key_starts[part] + before[part] + within
        used = torch.zeros(0, 0, dtype=torch.long, device=device)
        if trains:
            of_prompt = reading.group.argsort(stable=True).view(prompts, -1)  # [g, rows of each]
            first = key_starts[prompts + of_prompt]
            head = slice(reading.extent.prompted)
            used = first[part[head]] + within[head, None]
        return cls(
            starts.int(),
            key_starts.int(),
            part,
            within,
            before[part] + within,
            seen.clamp(0, reading.extent.positions - 1),
            owned.clamp(max=reading.extent.keys - 1),
            used,
        )

    def embed(self, reading: Reading, bank: Tensor, backbone: Backbone) -> Tensor:
        """[positions, d]: prompt vectors first, then tokens."""
        assert reading.extent is not None
        prompts, rows = len(reading.prompt), len(reading.length)
        head, rest = slice(reading.extent.prompted), slice(reading.extent.prompted, None)
        part, within = self.part[rest] - prompts, self.within[rest]
        row = part.clamp(0, rows - 1)
        ids = reading.ids[row, within.clamp(0, reading.ids.shape[1] - 1)]
        if reading.path.shape[1]:
            step, path = within - reading.length[row], row
            if not reading.is_single:
                step, path = within.where(part >= rows, -1), (part - rows).clamp(min=0)
            answer = reading.path[path, step.clamp(0, reading.path.shape[1] - 1)]
            ids = torch.where(step >= 0, answer, ids)
        embeds = backbone.embed(ids)
        if not reading.extent.prompted:
            return embeds
        # an embedding look-up, because its gradient is summed in a fixed order on every device
        slots = reading.slots[self.part[head], self.within[head]]
        return torch.cat([F.embedding(slots, bank).to(embeds), embeds])

    def reads(self, states: Tensor, reading: Reading) -> Tensor:
        """States [positions, h] where the paths answer -> [p, t, h]; past the end the last is repeated."""
        prompts, rows = len(reading.prompt), len(reading.length)
        steps = torch.arange(reading.path.shape[1] + 1, device=states.device)
        step = torch.minimum(steps, reading.reads[:, None] - 1)
        first = (self.starts[prompts + reading.owner] + reading.length[reading.owner])[:, None] - 1
        places = first + step
        if not reading.is_single:
            paths = self.starts[prompts + rows : -1, None] + step - 1
            places = torch.where(step == 0, first, paths)
        return states.index_select(0, places.flatten()).view(*places.shape, -1)


def _spread(lengths: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of these lengths [m] one behind another: where they start [m + 1], each position's part and place in it."""
    ends = lengths.cumsum(0)
    position = torch.arange(total, device=ends.device)
    part = torch.searchsorted(ends, position, right=True).clamp(max=len(ends) - 1)
    return F.pad(ends, (1, 0)), part, position - (ends - lengths)[part]


def line_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    line_starts: Tensor,
    line_key_starts: Tensor,
    line_seen: Tensor,
    line_owned: Tensor,
    line_used: Tensor,
    line_longest: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, heads, s, d] -> [1, s, heads, d]: every part of a line sees what it may, causal in itself."""
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    found, _lse = attend(
        q, k, v, line_starts, line_key_starts, line_seen, line_owned, line_used, line_longest, scaling
    )  # fmt: skip
    return found[None], None


AttentionInterface.register(LINE, line_attention)
