"""What every backbone family shares: the frozen model, texts to tokens, rows to one padded batch.

The model object stays what `from_pretrained` returned. Prompt vectors enter through
`inputs_embeds`; every sequence is contiguous and padded once, on the right.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from threading import RLock
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qtuning.backbones.answers import AnswerSet, TokenIds
from qtuning.backbones.compiled import CompiledLayers
from qtuning.backbones.extents import prompts_of
from qtuning.backbones.reading import Batch, Reading, Row, Tokens
from qtuning.errors import ConfigError
from qtuning.tasks import Text

P = ParamSpec("P")
R = TypeVar("R")
AFTER_TEXT = -1
"""For `prompt_at`: the prompt vectors follow the whole text."""
MASKED = -3e4
"""Added to the score of a position that must not be seen; its exponential is 0 in every number type."""
TAKES_READY_MASK = (
    "bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "mpnet", "albert",
    "bart", "mbart",
)  # fmt: skip
"""Models whose layers all see everything. Others, such as ModernBERT, have windows of their own."""
ALIGNED = 8
"""Half-precision kernels read so many numbers at once."""
REMEMBERED_TEXTS = 32_768
"""Texts whose tokens are kept, …"""
REMEMBERED_LENGTH = 8_192
"""… and how long they may be: what strangers send must not fill the memory."""
MIN_TEXT_TOKENS = 4
"""Fewer tokens than this left for the text, special ones included, is refused."""


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
    is_frozen: bool = field(default=True, init=False)
    """False for the copy of a method that trains the weights themselves."""
    prompt_at: int = field(default=0, init=False)
    """Tokens of the text that stand before the prompt vectors, or AFTER_TEXT."""
    family: str = field(default="", init=False)
    needs_head: bool = field(default=False, init=False)
    answer_follows_text: bool = field(default=False, init=False)
    """Whether the answer stands in the same sequence and takes room from the text."""
    compile: str = field(default="auto", init=False)
    """How far training is sped up: auto, on or off."""
    is_captured: bool = field(default=False, init=False)
    """Whether training steps are captured as CUDA graphs: at once on a card, unless `off`."""
    is_compiled: bool = field(default=False, init=False)
    """Whether layers are compiled: at once with `on`, when there is enough work ahead with `auto`."""
    for_all_lengths: bool = field(default=False, init=False)
    """Whether layers are compiled once for all lengths, as streams of many tasks want it, or for each shape."""
    may_score_compiled: bool = field(default=True, init=False)
    """False after compiled layers failed at it."""
    may_read_lines: bool = field(default=True, init=False)
    """False after a line of rows failed, in training or in scoring."""
    recorded: Any = field(default=None, init=False)
    """Passes of what is trained as CUDA graphs, see `qtuning.recorded`."""
    at_once: int | None = field(default=None, init=False)
    """Lanes that share a pass at most; by default as many as there are, or as fit the card's memory."""
    between_pair: str = field(default="", init=False)
    """Joins the two texts of a pair, where the tokenizer does not."""
    question: str = field(default="", init=False)
    """Stands between text and answer."""
    vocabulary_size: int = field(default=0, init=False)
    """Logits of one read-out, where answers are words."""

    def __post_init__(self) -> None:
        # a pass with another attention changes the model's settings meanwhile
        self._passing = RLock()
        self.model.requires_grad_(False)
        self.model.eval()  # no dropout, or lanes of a pack would depend on each other (A34)
        self.embedding = self.model.get_input_embeddings()
        # seeds share texts, and test rows are read again after every task
        self._coded_before = remembering(self._coded, REMEMBERED_TEXTS)
        special = self.tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
        self._closing = special[::-1].index(0) if 0 in special else None
        """Special tokens after a text; None where the tokenizer does not say."""
        self._uses_types = False
        self.embed_dim = int(self.embed(torch.zeros(1, dtype=torch.long)).shape[-1])
        if self.tokenizer.pad_token_id is None:
            self.pad_id = 0  # masked everywhere; any id will do
        else:
            self.pad_id = int(self.tokenizer.pad_token_id)

    @property
    def remembers_prompts(self) -> bool:
        """Whether a prompt can be read once for all texts of its task."""
        return False

    def read_prompt(self, layout: Tensor) -> Tensor:
        """What is kept of a prompt [rows, d] where they are remembered; see `prefixes`."""
        raise NotImplementedError

    @property
    def reads_lines(self) -> bool:
        """Whether rows are read one behind another, each prompt once for all of its rows; see `lines`."""
        return False

    @property
    def takes_branches(self) -> bool:
        """Whether a text with several paths takes the room of one."""
        return not self.answer_follows_text

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
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            out: Tensor = self.embedding(ids.to(self.device))
        return out

    @cached_property
    def vocabulary(self) -> list[int]:
        """Ids from which prompts are initialised: all tokens but the special ones."""
        special = set(self.tokenizer.all_special_ids)
        size = min(len(self.tokenizer), self.embedding.num_embeddings)
        return [i for i in range(size) if i not in special]

    def twin(self) -> Backbone:
        """The same weights under modules and a tokenizer of their own, for another thread.

        Modules and tokenizers keep settings that a pass may change for its duration; weights are only read.
        """
        shared = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        model, tokenizer = copy.deepcopy(self.model, shared), copy.deepcopy(self.tokenizer)
        own = type(self)(model, tokenizer, self.name, self.max_length, self.readout)
        own.compile, own.at_once = self.compile, self.at_once
        own.may_read_lines = self.may_read_lines
        return own

    def fingerprint(self) -> str:
        """A short hash of config shape and a sample of every weight, equal for float32 and bfloat16."""
        digest = hashlib.sha256(f"{self.family} {self.embed_dim} {len(self.tokenizer)}".encode())
        weights = dict(sorted(self.model.state_dict().items()))
        flat = [tensor.detach().reshape(-1) for tensor in weights.values()]
        samples = [each[:: max(1, each.numel() // 1024)][:1024].to(torch.bfloat16) for each in flat]
        # one copy for all: waiting for a card costs more than the bytes
        numbers = torch.split(torch.cat(samples).cpu(), [len(each) for each in samples])
        for (name, tensor), sample in zip(weights.items(), numbers, strict=True):
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:32]

    @property
    def scores_compiled(self) -> bool:
        """Whether texts are scored with compiled layers: where that cannot change in the middle of a run."""
        return self.is_compiled and self.compile == "dynamic" and self.may_score_compiled

    def training_layers(self) -> AbstractContextManager[None]:
        """Inside, the model runs as training wants it: compiled where that was decided."""
        if not self.is_compiled:
            return nullcontext()
        return self._compiled_layers.in_place(dynamic=self.for_all_lengths)

    @cached_property
    def _compiled_layers(self) -> CompiledLayers:
        return CompiledLayers(self.model)

    @property
    def takes_attention(self) -> bool:
        """Whether another function may stand in for the model's attention."""
        is_sdpa = self.model.base_model.config._attn_implementation == "sdpa"
        return is_sdpa and bool(getattr(self.model, "_supports_attention_backend", False))

    @contextmanager
    def attending(self, name: str) -> Iterator[None]:
        """Inside, that function is the model's attention, where it takes one, and no mask is made but ours.

        Making one looks for packed sequences, which waits for the device, and keeps the fastest kernels out.
        """
        with self._passing:
            if not self.takes_attention:
                yield
                return
            config = self.model.base_model.config
            before, config._attn_implementation = config._attn_implementation, name
            try:
                yield
            finally:
                config._attn_implementation = before

    def use_plain_layers(self) -> None:
        """Run the model's own modules from now on, where a family computes with their weights in its own way."""

    def aligned(self, width: int) -> int:
        """Positions of a sequence as the device's fast kernels want them: eights on a card."""
        if self.device.type != "cuda":
            return width
        return max(width, min(-(-width // ALIGNED) * ALIGNED, self.max_length))

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
        """Cut from the whole where that gives the same: methods leave different room for the same text."""
        parts = self._parts(text)
        if sum(map(len, parts)) > REMEMBERED_LENGTH:
            return self._coded(parts, room)
        whole = self._coded_before(parts, self.max_length)
        if len(whole.ids) <= room:
            return whole
        is_right = self.tokenizer.truncation_side == "right"
        if len(parts) > 1 or not is_right or self._closing is None:
            return self._coded_before(parts, room)
        kept, end = room - self._closing, len(whole.ids) - self._closing
        types = whole.types[:kept] + whole.types[end:]
        return Tokens(whole.ids[:kept] + whole.ids[end:], types)

    def _parts(self, text: Text) -> tuple[str, ...]:
        """What the tokenizer is given: one text, with a pair joined; or the pair."""
        return (self.between_pair.join(text) if isinstance(text, tuple) else text,)

    def _coded(self, parts: tuple[str, ...], room: int) -> Tokens:
        coded = self.tokenizer(
            *parts,
            truncation="longest_first",
            max_length=room,
            return_token_type_ids=self._uses_types,
        )
        return Tokens(tuple(coded["input_ids"]), tuple(coded.get("token_type_ids", ())))

    def _fewest_tokens(self) -> int:
        return MIN_TEXT_TOKENS

    # ── rows to read-outs ────────────────────────────────────────────────────────────────────

    def prepare(self, rows: Sequence[Row]) -> Reading:
        """Rows as tensors on the device."""
        paths = [path for row in rows for path in row.paths]
        owner = [i for i, row in enumerate(rows) for _ in row.paths]
        tails = [max(map(len, row.paths)) if self.answer_follows_text else 0 for row in rows]
        totals = [len(r.tokens.ids) + len(r.slots) + n for r, n in zip(rows, tails, strict=True)]

        def tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=self.device)

        def padded(sequences: Sequence[Sequence[int]], fill: int = 0) -> Tensor:
            shape = (len(sequences), max(map(len, sequences), default=0))
            filled = np.full(shape, fill, dtype=np.int64)
            for line, sequence in zip(filled, sequences, strict=True):
                line[: len(sequence)] = sequence
            return torch.from_numpy(filled).to(self.device)

        # one token at least: rows may be prompt and answer alone, and a look-up wants a place to look
        ids = padded([row.tokens.ids or (self.pad_id,) for row in rows], self.pad_id)
        types = torch.zeros_like(ids)
        if any(row.tokens.types for row in rows):
            types = padded([row.tokens.types or (0,) * len(row.tokens.ids) for row in rows])
        prompts, groups = prompts_of(rows)
        return Reading(
            ids=ids,
            types=types,
            length=tensor([len(row.tokens.ids) for row in rows]),
            slots=padded(prompts),
            prompt=tensor([len(slots) for slots in prompts]),
            group=tensor(groups),
            owner=tensor(owner),
            path=padded(paths, self.pad_id),
            reads=tensor([len(path) + 1 for path in paths]),
            width=self.aligned(max(totals, default=0)),
            is_even=len({len(row.paths) for row in rows}) <= 1,
        )

    def hidden(self, reading: Reading, bank: Tensor) -> Tensor:
        """Read-outs [p, t, h]: last hidden states where the rows answer.

        `bank` [rows, d] holds the prompt vectors of every lane; each row names its slots in it. Past
        the end of a shorter path its last read-out is repeated.
        """
        raise NotImplementedError

    def hidden_after(
        self, reading: Reading, prefixes: Any, tasks: Tensor, bank: Tensor | None = None
    ) -> Tensor:
        """The same after prompts or texts that were read before; see `remembers_prompts`."""
        raise NotImplementedError

    def text_states(self, batch: Batch) -> Tensor:
        """[b, s, h]: what the model makes of every position, answers and heads aside."""
        raise NotImplementedError

    def states(self, batch: Batch) -> Tensor:
        """The same, by a recorded pass where training has such."""
        if self.recorded and self.recorded.takes(batch):
            found: Tensor = self.recorded(self.text_states, batch)
            return found
        return self.text_states(batch)

    def feature(self, batch: Batch) -> Tensor:
        """[b, h]: one vector for each text, the mean of its tokens' states; prompt vectors are not averaged."""
        states = self.states(batch)
        kept = batch.is_text.unsqueeze(-1).to(states)
        return (states * kept).sum(dim=1) / kept.sum(dim=1)

    def closed(self, sequence: TokenIds) -> TokenIds:
        """A label's tokens as generation would write them to the end."""
        return sequence

    def logits(self, hidden: Tensor, head: Head | None) -> Tensor:
        """[..., n, t, h] -> [..., n, t, v] in the lanes' dtype: classes of the task's head, or the vocabulary."""
        raise NotImplementedError

    @property
    def takes_ready_mask(self) -> bool:
        """Whether a mask that is added to the scores is known to be right for every layer."""
        return self.model.config.model_type in TAKES_READY_MASK

    def mask(self, is_filled: Tensor, queries: int | None = None) -> Tensor:
        """What may be seen of [b, s]: [b, 1, q, s] to be added to the scores, or as it is for other models.

        Ready-made where it can be, because a model that makes its own waits for the device, and makes
        none at all for a batch without padding: another shape to compile.
        """
        if not self.takes_ready_mask:
            return is_filled.long()
        size = is_filled.shape[1] if queries is None else queries
        hidden = torch.where(is_filled, 0.0, MASKED).to(self.dtype)
        return hidden[:, None, None].expand(-1, 1, size, -1)

    def assemble(self, reading: Reading, bank: Tensor) -> Batch:
        """One padded batch: text before the slot, prompt vectors, text after it, then the path."""
        place = torch.arange(reading.width, device=self.device)
        prompt, length = reading.prompt[reading.group][:, None], reading.length[:, None]
        end = length + prompt
        start = length if self.prompt_at == AFTER_TEXT else self.prompt_at
        within = place - start
        is_prompt = (within >= 0) & (within < prompt)
        is_text = ~is_prompt & (place < end)
        word = torch.where(place < start, place, place - prompt)
        word = word.clamp(0, reading.ids.shape[1] - 1)
        ids = reading.ids.gather(1, word).where(is_text, self.pad_id)
        types = reading.types.gather(1, word).where(is_text, 0)
        total = end
        if self.answer_follows_text and reading.path.shape[1]:
            step = place - end
            tail = reading.reads[:, None] - 1
            answer = reading.path.gather(1, step.clamp(0, reading.path.shape[1] - 1))
            ids = torch.where((step >= 0) & (step < tail), answer, ids)
            total = end + tail
        embeds = self.embed(ids)
        if reading.slots.shape[1]:
            # an embedding look-up, because its gradient is summed in a fixed order on every device
            slots = reading.slots[
                reading.group[:, None], within.clamp(0, reading.slots.shape[1] - 1)
            ]
            vectors = F.embedding(slots.where(is_prompt, 0), bank).to(embeds)
            embeds = torch.where(is_prompt[..., None], vectors, embeds)
        return Batch(embeds, place < total, is_text, types, end.squeeze(1))


def remembering(method: Callable[P, R], most: int) -> Callable[P, R]:
    """The method with its latest results kept, but not its owner: a model must go as soon as nobody wants it."""
    weak: Any = weakref.WeakMethod(method)
    kept: Any = lru_cache(maxsize=most)(lambda *given: weak()(*given))
    return cast("Callable[P, R]", kept)
