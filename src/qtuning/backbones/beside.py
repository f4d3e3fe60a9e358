"""Attention over the parts of a line where there are no kernels for it: parts of a kind stand side by side, padded.

Only attention is padded: all other layers, where a small model spends its time, read every prompt once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtuning.backbones.products import ByProducts, attention, has_slow_gradient

KEYS_AT_ONCE = 32_768
"""Positions whose keys are gathered together at most: each of many paths has prompt and text for itself."""


class Kind(NamedTuple):
    """Parts of a line with about as many positions, after about as many: at most twice those of another of them."""

    queries: Tensor
    """[n, q] positions of each part; past its end its first."""
    keys: Tensor
    """[n, k] positions that it sees, in the order in which a model would read them; past its end its first."""
    mask: Tensor
    """[n, 1, q, k] 0 where a query sees a key, what stands before the part and the part so far; else -inf."""


class Beside(NamedTuple):
    """The parts of a line, by kind."""

    kinds: Sequence[Kind]
    place: Tensor
    """[s] where each position of the line stands among the queries of all kinds, from 1 on; 0 after the last part."""

    @classmethod
    def of(cls, starts: Tensor, before: Tensor, positions: int, dtype: torch.dtype) -> Beside:
        """Of parts that begin at `starts` [m + 1], after `before` [m, 2] others; see `Line`. `dtype` is the model's."""
        first, lengths, others = starts[:-1].long(), starts.diff().long(), before.long()
        sizes = lengths[others].where(others >= 0, 0)
        ahead = sizes.sum(dim=1)
        # of how many doublings of 1: queries and keys of a kind are padded to at most twice as many
        asking, seeing = (
            n.clamp(min=1).double().log2().ceil().long() for n in (lengths, ahead + lengths)
        )
        alike = torch.where(lengths > 0, 64 * asking + seeing, -1)
        place = torch.zeros(positions, dtype=torch.long)
        kinds: list[Kind] = []
        filled = 1
        for own in _apart(alike, ahead + lengths):
            q = torch.arange(int(lengths[own].max()))
            k = torch.arange(int((ahead + lengths)[own].max()))
            is_real = q < lengths[own]
            queries = first[own] + q.where(is_real, 0)
            keys = first[own] + (k - ahead[own]).where(k < (ahead + lengths)[own], 0)
            prompt, text = others[own[:, 0]].unsqueeze(2).unbind(1)
            skipped = sizes[own[:, 0], :1]
            keys = torch.where(k < ahead[own], first[text] + k - skipped, keys)
            keys = torch.where(k < skipped, first[prompt] + k, keys)
            place[queries[is_real]] = filled + is_real.flatten().nonzero()[:, 0]
            filled += is_real.numel()
            is_seen = (k <= (ahead[own] + q)[..., None])[:, None]
            # once for all layers, which would make it of a mask of truths each
            mask = torch.zeros(is_seen.shape, dtype=dtype).masked_fill_(~is_seen, -torch.inf)
            kinds.append(Kind(queries, keys, mask))
        return cls(kinds, place)


def _apart(alike: Tensor, seen: Tensor) -> Iterator[Tensor]:
    """Indices [n, 1] of parts of the same number, 0 or more, as many together as may be gathered at once."""
    for number in sorted(set(alike.tolist()) - {-1}):
        own = (alike == number).nonzero()
        yield from own.split(max(1, KEYS_AT_ONCE // int(seen[own].max())))


def attend_beside(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    line: Beside,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, heads, s, d] -> [1, s, heads, d], as `line_attention`; torch differentiates it."""
    states = [each[0].transpose(0, 1) for each in (query, key, value)]
    found = [torch.zeros_like(states[0][:1])]
    for kind in line.kinds:
        places = (kind.queries, kind.keys, kind.keys)
        q, k, v = (
            each.index_select(0, own.flatten()).view(*own.shape, *each.shape[1:]).transpose(1, 2)
            for each, own in zip(states, places, strict=True)
        )
        attend = ByProducts.apply if has_slow_gradient(q) else attention
        out = attend(q, k, v, kind.mask, scaling)
        found.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(found).index_select(0, line.place)[None], None
