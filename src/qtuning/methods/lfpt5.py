"""LFPT5 (Qin and Joty, 2022): one prompt that also learns to write its tasks' texts, so as to rehearse them.

The prompt stands after the text. Beside the task it learns, from the task's name alone, to write a training
example ("text Answer: label"). Before the next task it writes some for every earlier task; those that
can be read back are pseudo-samples, on which the new prompt is held to the answers of the old one. The loss
is (1 - k)(task + l lm) + k KL(old || new) with l = `lm_weight` and k = `pseudo_share`, divided here by 1 - k,
which Adam does not notice.

Relations: `prompt-tuning`, which also carries one prompt on, with a rehearsal that stores no data. The prompt is
as long as the whole Q-prompt (the release has 300 vectors), and begins with the label words.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor

from qtuning.backbones import AnswerSet, Backbone, Row
from qtuning.backbones.base import AFTER_TEXT
from qtuning.backbones.vocabulary import VocabularyBackbone
from qtuning.config import MethodSettings, TrainSettings
from qtuning.lanes import Report
from qtuning.methods import MethodInfo, register
from qtuning.methods.rehearsing import LFPT5Loss
from qtuning.prompts import sample_vocabulary_rows
from qtuning.seeding import derive_seed, torch_generator
from qtuning.snapshots import Snapshot, TaskCard, added
from qtuning.tasks import Rows, Split, Task, Text
from qtuning.weights import Examples, Hooks, fit_weights, make_examples, recorded_passes

MARK = "Answer:"
WRITTEN_TOKENS = 128
"""Of a written example at most."""
WRITTEN_AT_ONCE = 256
"""Examples that are written side by side at most."""
TOP_K, REPETITION_PENALTY = 64, 2.5
"""Of sampling, as released."""


def write_sample(text: Text, word: str) -> str:
    """An example as the prompt learns to write it."""
    whole = " ".join(text) if isinstance(text, tuple) else text
    return f"{whole} {MARK} {word}"


def read_sample(written: str, card: TaskCard) -> tuple[Text, int] | None:
    """Text and label of what the prompt wrote, or None if it is no example of the task.

    A pair of texts is cut in the middle: where the second began was not written down.
    """
    found = re.fullmatch(r"\s*(.*\S)\s+Answer\s*:\s*(.*\S)\s*", written, flags=re.DOTALL)
    if not found:
        return None
    words = {
        " ".join(card.label_words[name].lower().split()): i
        for i, name in enumerate(card.label_names)
    }
    label = words.get(" ".join(found[2].lower().split()))
    if label is None:
        return None
    text = found[1]
    if not card.is_pair:
        return text, label
    parts = text.split()
    middle = len(parts) // 2
    return ((" ".join(parts[:middle]), " ".join(parts[middle:])), label) if middle else None


@dataclass(frozen=True)
class LFPT5State:
    """One prompt for all tasks."""

    seed: int
    view: Backbone = field(repr=False, compare=False)
    """The frozen backbone, with the prompt after the text."""
    prompt: Tensor
    """[rows, d]."""
    learnt: int = 0
    snapshots: dict[str, Snapshot] = field(default_factory=dict)

    def answers(self, backbone: Backbone, name: str) -> tuple[Backbone, Snapshot]:
        """Any task, with today's prompt."""
        return self.view, replace(self.snapshots[name], rows=self.prompt)


class LFPT5:
    """The method, bound to a backbone and its settings."""

    def __init__(self, backbone: Backbone, settings: MethodSettings, train: TrainSettings):
        assert isinstance(backbone, VocabularyBackbone)
        self.backbone, self.settings, self.train = backbone, settings, train
        self.rows = settings.shared_length + settings.prompt_length * settings.queue_size
        self.longest = min(WRITTEN_TOKENS, (backbone.max_length - self.rows) // 2)
        self.view = copy.copy(backbone)
        self.view.prompt_at = AFTER_TEXT
        self.view.is_compiled = False  # whatever another method on the same backbone has decided

    def start(self, seed: int) -> LFPT5State:
        """No prompt yet: the first task's label words begin it."""
        return LFPT5State(seed, self.view, torch.zeros(0, self.backbone.embed_dim))

    def learn(
        self, state: LFPT5State, task: Task, split: Split, report: Report | None = None
    ) -> LFPT5State:
        """The state after one more task."""
        card, device = TaskCard.of(task), self.backbone.device
        old = (state.prompt if state.learnt else self._first_prompt(state.seed, card)).to(device)
        prompt = old.clone().requires_grad_()
        train = make_examples(self.view, task, split.train, None, prompt)
        validation = make_examples(self.view, task, split.validation, None, prompt)
        writing = self._writing(card, split.train, prompt)
        written = self.pseudo_samples(state)
        pseudo = [
            make_examples(self.view, earlier.card, rows, None, prompt)
            for earlier in state.snapshots.values()
            if (rows := written[earlier.card.name])
        ]
        # anew for every task: there are more pseudo-samples each time, and no pass has the shape of an earlier one
        self.view.recorded = recorded_passes(self.view, [])
        try:
            facts = fit_weights(
                LFPT5Loss(train, writing, pseudo, old, self.settings, self.backbone),
                validation,
                task.metric,
                self.train,
                torch_generator(state.seed, state.learnt, task.name, "order"),
                Hooks(),
                [([prompt], self.train.prompt_lr)],
                report,
                (f"{task.name}, seed {state.seed}", task.name),
            )
        finally:
            self.view.recorded = None  # and its memory goes back
        learnt = prompt.detach().cpu()
        recorded: dict[str, Any] = {
            **facts,
            "seed": state.seed,
            "split": split.sizes,
            "rows": len(learnt),
            "pseudo_samples": sum(map(len, pseudo)),
        }
        snapshots = added(state.snapshots, Snapshot(card, learnt, None, recorded))
        return replace(state, prompt=learnt, learnt=state.learnt + 1, snapshots=snapshots)

    def pseudo_samples(self, state: LFPT5State) -> dict[str, Rows]:
        """What today's prompt writes for each earlier task, as far as it can be read back."""
        cards = [earlier.card for earlier in state.snapshots.values()]
        counts = [self.settings.pseudo_samples * len(card.label_names) for card in cards]
        asked = [card.name for card, n in zip(cards, counts, strict=True) for _ in range(n)]
        prompt, texts = state.prompt.to(self.backbone.device), []
        for first in range(0, len(asked), WRITTEN_AT_ONCE):
            seed = derive_seed(state.seed, state.learnt, first, "pseudo")
            texts += self._write(asked[first : first + WRITTEN_AT_ONCE], prompt, seed)
        written = iter(texts)
        rows = {}
        for card, n in zip(cards, counts, strict=True):
            found = [sample for each in islice(written, n) if (sample := read_sample(each, card))]
            rows[card.name] = Rows(tuple(text for text, _ in found), tuple(label for _, label in found))  # fmt: skip
        return rows

    @torch.no_grad()
    def _write(
        self, names: Sequence[str], prompt: Tensor, seed: int, do_sample: bool = True
    ) -> list[str]:
        """A sample for every name of a task, from that and the prompt; all at once."""
        if not names:
            return []
        tokens = self.view.tokenize(names, len(prompt), self.longest)
        slots = range(len(prompt))
        reading = self.view.prepare([Row(each, slots) for each in tokens])
        batch = self.view.assemble(reading, prompt)
        embeds, is_filled = batch.inputs_embeds, batch.is_filled
        if self.view.answer_follows_text:
            embeds, is_filled = _to_the_right(embeds, batch.end)
        devices = [self.backbone.device] if self.backbone.device.type == "cuda" else []
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            # the penalty is meant for what is written, not for the prompt
            warnings.filterwarnings("ignore", message="Passing `repetition_penalty`")
            torch.manual_seed(seed)
            ids = self.backbone.model.generate(
                inputs_embeds=embeds,
                attention_mask=is_filled.long(),
                do_sample=do_sample,
                top_k=TOP_K if do_sample else None,
                repetition_penalty=REPETITION_PENALTY,
                max_new_tokens=self.longest,
                pad_token_id=self.backbone.pad_id,
            )
        # after its end a sample is padded, with a word where a tokenizer has no token for it; a decoder's first token
        # may be an end, and is none of the sample
        own = ids if self.view.answer_follows_text else ids[:, 1:]
        end = self.backbone.model.generation_config.eos_token_id
        ends = {end} if isinstance(end, int) else set(end or ())
        written = [list(takewhile(lambda each: each not in ends, row)) for row in own.tolist()]
        texts: list[str] = self.backbone.tokenizer.batch_decode(written, skip_special_tokens=True)
        return texts

    def _writing(self, card: TaskCard, rows: Rows, prompt: Tensor) -> Examples:
        """Every training example as the answer to the task's name."""
        words = [card.label_words[name] for name in card.label_names]
        samples = [
            write_sample(t, words[label]) for t, label in zip(rows.texts, rows.labels, strict=True)
        ]
        tails = [f"{MARK} {words[label]}" for label in rows.labels]
        sequences = [
            _shortened(self.view, sample, tail, self.longest)
            for sample, tail in zip(samples, tails, strict=True)
        ]
        name = self.view.tokenize([card.name], len(prompt), self.longest)[0]
        answers = AnswerSet.build(sequences)
        return Examples(
            self.view, answers, None, [name] * len(rows), range(len(rows)), prompt
        )  # fmt: skip

    def _first_prompt(self, seed: int, card: TaskCard) -> Tensor:
        """[rows, d]: the label words' embeddings, then those of drawn tokens."""
        backbone = self.backbone
        words = [card.label_words[name] for name in card.label_names]
        own = [token for sequence in backbone.answers(words).sequences for token in sequence]
        drawn = sample_vocabulary_rows(
            backbone.embed, backbone.vocabulary, self.rows, torch_generator(seed, "prompt")
        )
        first = backbone.embed(torch.tensor(own[: self.rows])).to(drawn)
        return torch.cat([first, drawn])[: self.rows].to("cpu", backbone.lane_dtype)

    def pack(self, state: LFPT5State) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The prompt."""
        return {"prompt": state.prompt}, {"seed": state.seed, "learnt": state.learnt}

    def unpack(
        self, tensors: dict[str, Tensor], facts: dict[str, Any], snapshots: dict[str, Snapshot]
    ) -> LFPT5State:
        """The state that `pack` described."""
        return LFPT5State(
            facts["seed"], self.view, tensors["prompt"], facts["learnt"], snapshots
        )  # fmt: skip


def _to_the_right(embeds: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences [b, s, d] that end at `end` [b], padded on the left, and what is filled: all go on from one place."""
    width = int(end.max())
    place = torch.arange(width, device=end.device) - (width - end)[:, None]
    moved = embeds.gather(1, place.clamp(min=0)[..., None].expand(-1, -1, embeds.shape[-1]))
    return moved, place >= 0


def _shortened(view: Backbone, sample: str, tail: str, room: int) -> tuple[int, ...]:
    """Tokens of a sample with its end, the text cut so that the label always fits."""
    assert isinstance(view, VocabularyBackbone)
    whole, end = (view.closed(view.answer_tokens([each])[0]) for each in (sample, tail))
    return whole if len(whole) <= room else (*whole[: max(1, room - len(end))], *end)


register(
    MethodInfo(
        name="lfpt5",
        description="one prompt, carried on, that rehearses earlier tasks on examples it writes itself",
        paper="Qin and Joty, 2022, arXiv 2110.07298",
        make=LFPT5,
        families=("causal", "seq2seq"),
        forgets=True,
        packable=False,
        grid={"prompt_lr": (0.3, 1.0, 3.0), "pseudo_share": (1.0, 5.0)},
    )
)
