"""GPT-like backbones: prompt vectors, text, label words; read at the end of the text."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qtuning.backbones.answers import TokenIds
from qtuning.backbones.attend import kernel_works
from qtuning.backbones.base import AFTER_TEXT, ALIGNED, MASKED, MIN_TEXT_TOKENS
from qtuning.backbones.extents import Extent
from qtuning.backbones.lines import TAKES_LINES, Line
from qtuning.backbones.prefixes import Prefixes
from qtuning.backbones.products import QUICK
from qtuning.backbones.reading import Batch, Reading, Row, Tokens, gather_reads
from qtuning.backbones.vocabulary import VocabularyBackbone
from qtuning.errors import in_a_line
from qtuning.tasks import Text

TAKES_BRANCHES = ("gpt2", "llama", "opt")
"""Models seen to give the same numbers with a mask and positions of ours. Windows and ALiBi would count what is not
seen; any other model reads the text again for every path."""
ALIKE = 0.1
"""Share by which numbers of two ways may differ: half precision does by a hundredth, another attention altogether."""
QUESTION = "\nAnswer:"
"""Stands between text and label words, so that the model knows where the text ends."""


@dataclass
class CausalBackbone(VocabularyBackbone):
    """Scores label words after the text; the prompt stands before everything, as in PEFT."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.family = "causal"
        self.answer_follows_text = True
        self.between_pair, self.question = "\n", QUESTION
        self._question = tuple(self.tokenizer(QUESTION, add_special_tokens=False)["input_ids"])

    def answer_tokens(self, label_words: Sequence[str]) -> list[TokenIds]:
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
        ids = super()._tokens_of(text, room - len(self._question)).ids
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids = ids[:-1]  # some tokenizers close every text; ours goes on
        return Tokens(ids + self._question)

    def _fewest_tokens(self) -> int:
        return MIN_TEXT_TOKENS + len(self._question)

    def hidden(self, reading: Reading, bank: Tensor) -> Tensor:
        """[p, t, h]. Rows with one path need no mask: padding stands on the right, where nobody looks."""
        if reading.extent and self.may_read_lines:
            if torch.is_grad_enabled():
                return self._read_line(reading, bank)  # who trains knows what to do if that fails
            try:
                return self._read_line(reading, bank)
            except torch.OutOfMemoryError:
                raise  # padded rows would need more
            except Exception as error:
                self.may_read_lines = False
                said = in_a_line(error)
                warnings.warn(
                    f"{self.name!r} reads padded rows from now on ({said}).", stacklevel=2
                )
        if not reading.is_single:
            if self.takes_branches:
                return self._read_branches(reading, bank)
            reading = reading.expanded()
        batch = self.assemble(reading, bank)
        states = self.states(batch)
        longest = reading.path.shape[1] + 1
        return gather_reads(states, batch.end - 1, reading.reads, longest)

    def text_states(self, batch: Batch) -> Tensor:
        """[b, s, h]."""
        with self.attending(QUICK):
            states: Tensor = self.model.base_model(
                inputs_embeds=batch.inputs_embeds, use_cache=False
            ).last_hidden_state
        return states

    def _read_line(self, reading: Reading, bank: Tensor) -> Tensor:
        """[p, t, h] of prompts, texts and paths in a single sequence."""
        line = Line.of(reading)
        with self.attending(line.attention):
            states: Tensor = self.model.base_model(
                inputs_embeds=line.embed(reading, bank, self)[None],
                position_ids=line.place[None].clamp(max=self.max_length - 1),
                use_cache=False,
                line=line.seen(self.dtype),
            ).last_hidden_state
        return line.reads(states[0], reading)

    @property
    def reads_lines(self) -> bool:
        """Where models known to take them give the same so: on a CPU, and in half precision on a card with kernels."""
        config = self.model.config
        takes_them = config.model_type in TAKES_LINES and self.takes_attention
        if not (takes_them and self.is_frozen and self.may_read_lines):
            return False
        if self.prompt_at == AFTER_TEXT or not self._attends_to_lines:
            return False
        return self._reads_alike

    @property
    def _attends_to_lines(self) -> bool:
        """Whether the device has an attention for them."""
        if self.device.type == "cpu":
            return self.compile not in ("on", "dynamic")  # every line has sizes of its own
        if self.device.type != "cuda" or self.dtype not in (torch.bfloat16, torch.float16):
            return False
        config = self.model.config
        heads = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return kernel_works(self.device, self.dtype, heads, shared, width)

    @cached_property
    def _reads_alike(self) -> bool:
        """Whether a few rows, one longer than a tile, have the same read-outs in a line as padded: tried once."""
        words, prompts = self.vocabulary, (range(3), range(3, 5))
        ids = [words[i * len(words) // 24] for i in range(24)]
        rows = [
            Row(Tokens(tuple(ids[:5])), prompts[0], ((ids[5], ids[6]), (ids[7],))),
            Row(Tokens(tuple(ids * 4)[: self.max_length // 2]), prompts[1], ((ids[20],),)),
            Row(Tokens(tuple(ids[3:9])), prompts[1], ((),)),
        ]
        bank = self.embed(torch.tensor(ids[10:15])).to(self.lane_dtype)
        reading = self.prepare(rows)
        with torch.no_grad():
            padded = self.hidden(reading, bank)
            try:
                line = self._read_line(replace(reading, extent=Extent.of(rows, self.device)), bank)
            except Exception:  # a model that does not take it, in whatever way
                return False
        apart = (line - padded).norm(dim=-1) / padded.norm(dim=-1)
        return bool(apart.max() < ALIKE)

    @property
    def takes_attention(self) -> bool:
        """Ours know no window: a model that has one must see all positions through it."""
        config = self.model.base_model.config
        window = getattr(config, "sliding_window", None) or self.max_length
        return super().takes_attention and window >= self.max_length

    @property
    def takes_branches(self) -> bool:
        """Whether all paths of a row are read in one sequence; flash attention takes no such mask."""
        takes_mask = self.model.base_model.config._attn_implementation in ("sdpa", "eager")
        return takes_mask and self.model.config.model_type in TAKES_BRANCHES

    @property
    def remembers_prompts(self) -> bool:
        """Whether prompts can be read once and for all; see `prefixes`."""
        is_first = self.prompt_at != AFTER_TEXT
        return is_first and self.takes_branches

    @torch.no_grad()
    def read_prompt(self, layout: Tensor) -> Tensor:
        """[layers, 2, heads, rows, head width] of a prompt [rows, d]: keys and values."""
        with self._passing:
            passed = self.model.base_model(
                inputs_embeds=layout.to(self.dtype)[None], use_cache=True
            )
        layers = passed.past_key_values.layers
        return torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in layers])

    def hidden_after(
        self, reading: Reading, prefixes: Prefixes, tasks: Tensor, bank: Tensor | None = None
    ) -> Tensor:
        """[p, t, h] of rows, each after what is remembered of its task [n]; `bank` where they have slots, too."""
        cache, filled = prefixes.of(tasks)
        if bank is None:
            bank = torch.zeros(0, self.embed_dim, dtype=self.lane_dtype, device=self.device)
        return self._read_branches(reading, bank, cache, filled)

    def _read_branches(
        self, reading: Reading, bank: Tensor, cache: Any = None, filled: Tensor | None = None
    ) -> Tensor:
        """[p, t, h]: prompt, text and all paths of a row in one sequence; a path sees prompt, text and itself.

        With a `cache` of prompts, of which each row has so many positions `filled` [n], the text goes on from that.
        """
        branch = reading.branch()
        most, steps = int(branch.max()) + 1, reading.path.shape[1]
        on_card = self.device.type == "cuda"  # where kernels want eights
        width = reading.width + (-(reading.width + most * steps) % ALIGNED if on_card else 0)
        batch = self.assemble(replace(reading, path=reading.path[:, :0], width=width), bank)
        rows, end = len(batch.end), batch.end
        tokens = torch.full((rows, most, steps), self.pad_id, device=self.device)
        tokens[reading.owner, branch] = reading.path
        embeds = torch.cat([batch.inputs_embeds, self.embed(tokens.flatten(1))], dim=1)
        step = torch.arange(steps, device=self.device).repeat(most)
        place = torch.arange(width, device=self.device).expand(rows, -1)
        place = torch.cat([place, end[:, None] + step], dim=1)
        seen = _tree(end, width, most, steps)
        if filled is not None:
            cached = torch.arange(cache.get_seq_length(), device=self.device)
            remembered = (cached < filled[:, None])[:, None].expand(-1, seen.shape[1], -1)
            seen = torch.cat([remembered, seen], dim=2)
            place = place + filled[:, None]
        mask = torch.full(seen.shape, MASKED, dtype=self.dtype, device=self.device)
        with self.attending(QUICK) if torch.is_grad_enabled() else self._passing:
            states: Tensor = self.model.base_model(
                inputs_embeds=embeds,
                attention_mask=mask.masked_fill_(seen, 0.0)[:, None],
                position_ids=place.clamp(max=self.max_length - 1),  # padding may stand past its end
                past_key_values=cache,
                use_cache=cache is not None,
            ).last_hidden_state
        first = states[torch.arange(rows, device=self.device), end - 1][reading.owner][:, None]
        paths = states[:, width:].reshape(rows, most, steps, states.shape[2])[reading.owner, branch]
        states = torch.cat([first, paths], dim=1)
        return gather_reads(states, torch.zeros_like(reading.reads), reading.reads, steps + 1)

    def _reference_logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return logits, self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def _tree(end: Tensor, width: int, branches: int, steps: int) -> Tensor:
    """[n, q, k] what each position may see: text that ends at `end` [n] in `width` positions, then so many branches.

    A position of the text sees what stands before it, one of a branch the whole text and its own branch so far.
    """
    place = torch.arange(width + branches * steps, device=end.device)
    is_text = place < width
    earlier = place <= place[:, None]
    branch = (place - width).div(max(steps, 1), rounding_mode="floor")
    in_text = is_text[:, None] & is_text & earlier
    in_branch = ~is_text[:, None] & (branch[:, None] == branch) & ~is_text & earlier
    to_text = ~is_text[:, None] & (place < end[:, None, None])
    return in_text | in_branch | to_text
