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
from qtuning.backbones.base import Backbone
from qtuning.backbones.beside import Beside, attend_beside
from qtuning.backbones.extents import TILE
from qtuning.backbones.reading import Reading

LINE = "qtuning-line"
LINE_ON_CPU = "qtuning-line-on-cpu"
TAKES_LINES = (
    "gemma", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "opt", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
"""Models seen to give the same numbers with an attention and positions of ours; any other reads padded rows."""


@dataclass(frozen=True)
class Line:
    """Prompts, then texts, then paths where a text has several; what follows the last is seen by none.

    Made on the device without waiting for it: all sizes are those of the reading's extent.
    """

    starts: Tensor
    """[m + 1] where each part begins, and where the last one ends; int32, as kernels want it."""
    before: Tensor
    """[m, 2] the prompt and the text that stand before each part, -1 for none."""
    seen_by: Tensor
    """[m, 2] positions, from the first to before the last, that see a prompt; empty for other parts."""
    tiles: Tensor
    """[t, 2] part, and place in it, of every stretch of `TILE` positions; part -1 for none."""
    part: Tensor
    """[positions] the part that a position is in, …"""
    within: Tensor
    """… and which of its positions it is."""
    place: Tensor
    """[positions] the same, counted from the beginning of its prompt."""

    @classmethod
    def of(cls, reading: Reading) -> Line:
        """Where everything stands. For gradients rows have one path each, and stand in the order of their prompts."""
        assert reading.extent is not None
        device, positions = reading.length.device, reading.extent.positions
        prompts, rows = len(reading.prompt), len(reading.length)
        tail = reading.reads - 1
        nothing = torch.full((prompts,), -1, device=device)
        root, text = torch.cat([nothing, reading.group]), nothing.new_full((prompts + rows,), -1)
        if reading.is_single:  # the path belongs to its text
            lengths = torch.cat([reading.prompt, reading.length + tail])
        else:
            root = torch.cat([root, reading.group[reading.owner]])
            text = torch.cat([text, prompts + reading.owner])
            lengths = torch.cat([reading.prompt, reading.length, tail])
        starts, part, within = _spread(lengths, positions)
        count = -(-lengths // TILE)
        ends, tiled, stretch = _spread(count, positions // TILE + len(lengths))
        is_tile = torch.arange(len(tiled), device=device) < ends[-1]
        texts_first = torch.searchsorted(reading.group, torch.arange(prompts + 1, device=device))
        edges = starts[prompts + texts_first]
        seen_by = F.pad(torch.stack([edges[:-1], edges[1:]], dim=1), (0, 0, 0, len(lengths) - prompts))  # fmt: skip
        ahead = lengths[root].where(root >= 0, 0) + lengths[text].where(text >= 0, 0)
        return cls(
            starts.int(),
            torch.stack([root, text], dim=1).int(),
            seen_by.int(),
            torch.stack([tiled.where(is_tile, -1), stretch * TILE], dim=1).int(),
            part,
            within,
            ahead[part] + within,
        )

    @property
    def attention(self) -> str:
        """The function that takes what `seen` says."""
        return LINE if self.starts.is_cuda else LINE_ON_CPU

    def seen(self, dtype: torch.dtype) -> Beside | tuple[Tensor, ...]:
        """What each position sees, as attention wants to know it on this device; `dtype` is the model's."""
        if self.starts.is_cuda:
            return self.starts, self.before, self.seen_by, self.tiles
        return Beside.of(self.starts, self.before, len(self.part), dtype)

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
        length = reading.length[reading.owner]
        path = self.starts[prompts + reading.owner] + length
        # a text may be empty: then the prompt says how the answer begins
        prompt_ends = self.starts[1 + reading.group[reading.owner]]
        first = torch.where(length > 0, path, prompt_ends) - 1
        if not reading.is_single:
            path = self.starts[prompts + rows : -1]
        places = torch.where(step == 0, first[:, None], path[:, None] + step - 1)
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
    line: tuple[Tensor, ...],
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, heads, s, d] -> [1, s, heads, d]: every part of a line sees what it may, causal in itself."""
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(q, k, v, *line, scaling)[0][None], None


AttentionInterface.register(LINE, line_attention)
AttentionInterface.register(LINE_ON_CPU, attend_beside)
