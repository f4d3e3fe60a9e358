"""What LFPT5 learns at a step: the task, writing its examples, and pseudo-samples of earlier tasks; in few passes.

Where a causal model reads a text the same way whatever prompt follows, it does so once for a whole task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from qtuning.backbones import AnswerSet, Backbone, Row, Tokens
from qtuning.backbones.extents import Extent
from qtuning.backbones.prefixes import Prefixes, PromptMemory
from qtuning.config import MethodSettings
from qtuning.objectives import cross_entropy_in_parts
from qtuning.weights import Examples

WORDS_AT_ONCE = 64
"""Tokens whose logits over the vocabulary a processor's cache has room for."""


class LFPT5Loss:
    """A task's examples, the same to be written, and pseudo-samples of earlier tasks.

    A card waits for kernels to be launched, so that a pass for each earlier task would cost as much as the task: there
    pseudo-samples stand beside the task. On a CPU padding costs more, and all of them have one pass of their own.
    """

    def __init__(
        self,
        train: Examples,
        writing: Examples,
        pseudo: Sequence[Examples],
        old_prompt: Tensor,
        settings: MethodSettings,
        plain: Backbone,
    ):
        """`plain` is the backbone with the prompt before the text."""
        self.backbone, self.settings = train.backbone, settings
        self.train, self.writing = train, writing
        self.pseudo = _first_tokens(pseudo) if pseudo else None
        again = [self.pseudo] if self.pseudo else []
        self.passes: list[_Pass]
        if _reads_texts_once(self.backbone, plain):
            self.passes = [
                *(_AfterTexts(each) for each in (train, *again)),
                _FromName(writing, plain),
            ]
        else:
            is_one = _share_a_pass(self.backbone.device)
            parts = [[train, *again]] if is_one else [[train], *([each] for each in again)]
            # what is written is longer than the rest, which would be padded to it
            self.passes = [_Joined(own) for own in (*parts, [writing])]
        if self.pseudo:
            shares = [1 / len(each) for each in pseudo for _ in range(len(each))]
            self.shares = torch.tensor(shares, dtype=old_prompt.dtype, device=old_prompt.device)
            with torch.no_grad():
                read = self.backbone.hidden(self.pseudo.reading, old_prompt)
                self.old = self._log_probs(read)

    def __len__(self) -> int:
        return len(self.train)

    def loss(self, batch: Sequence[int]) -> Tensor:
        """The task's, with writing and rehearsal."""
        places: list[Sequence[int]] = [batch, batch]
        if self.pseudo:
            places.insert(1, range(len(self.pseudo)))
        waiting = iter(places)
        own, *again, written = [
            hidden
            for each in self.passes
            for hidden in each.hidden(list(islice(waiting, each.parts)))
        ]
        total = self.train.loss(batch, own) + self.settings.lm_weight * self.lm(batch, written)
        share = self.settings.pseudo_share
        return total + share / (1 - share) * self.rehearsal(*again) if again else total

    def lm(self, batch: Sequence[int], hidden: Tensor) -> Tensor:
        """Mean cross-entropy of every token of the examples; on a CPU without all their logits at once."""
        if self.backbone.device.type != "cpu":
            return self.writing.loss(batch, hidden)
        targets = self.writing.targets[list(batch), : hidden.shape[1]]
        return cross_entropy_in_parts(
            hidden, targets, lambda states: self.backbone.logits(states, None), WORDS_AT_ONCE
        )

    def rehearsal(self, hidden: Tensor) -> Tensor:
        """KL(old || new), mean over the pseudo-samples of each earlier task, summed over tasks."""
        new = self._log_probs(hidden)
        each = F.kl_div(new, self.old, reduction="none", log_target=True).sum(dim=-1)
        return (each * self.shares).sum()

    def _log_probs(self, hidden: Tensor) -> Tensor:
        """[n, v]: the distribution of the first answer token."""
        return F.log_softmax(self.backbone.logits(hidden[:, :1], None)[:, 0], dim=-1)


class _Pass(Protocol):
    """One pass of a step, for one set of examples or several."""

    parts: int
    """Sets of examples."""

    def hidden(self, places: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """Read-outs [n, t, h] of some of each set."""


class _Joined:
    """Several sets of examples with the same prompt, padded to the longest."""

    def __init__(self, parts: Sequence[Examples]):
        self.backbone, self.bank, self.parts = parts[0].backbone, parts[0].bank(), len(parts)
        self.firsts = [0, *accumulate(len(part) for part in parts[:-1])]
        self.lengths = [length for part in parts for length in part.lengths]
        self.reading = self.backbone.prepare([row for part in parts for row in part.rows])

    def hidden(self, places: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """Read-outs [n, t, h] of some of each part."""
        rows = [k + i for k, own in zip(self.firsts, places, strict=True) for i in own]
        index = torch.tensor(rows, device=self.backbone.device)
        reading = self.reading.at(index, max(self.lengths[i] for i in rows))
        return torch.split(self.backbone.hidden(reading, self.bank), [len(own) for own in places])


class _AfterTexts:
    """Examples whose texts were read before: a step reads the prompt and the answers."""

    parts = 1

    def __init__(self, examples: Examples):
        self.backbone, self.bank = examples.backbone, examples.bank()
        # all but the last token: a sequence may begin with a prompt, but not with nothing
        texts = [torch.tensor(row.tokens.ids[:-1]) for row in examples.rows]
        memory = PromptMemory(self.backbone.read_prompt)
        self.texts = Prefixes(memory, [self.backbone.embed(text) for text in texts])
        rows = [replace(row, tokens=Tokens(row.tokens.ids[-1:])) for row in examples.rows]
        self.reading = self.backbone.prepare(rows)

    def hidden(self, places: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """Of the one set."""
        index = torch.tensor(list(places[0]), device=self.backbone.device)
        reading = self.reading.at(index, 1 + len(self.bank))
        return [self.backbone.hidden_after(reading, self.texts, index, self.bank)]


class _FromName:
    """Examples that are written from one text, the task's name: name and prompt are read once for a step."""

    parts = 1

    def __init__(self, examples: Examples, plain: Backbone):
        self.backbone, self.prompt = plain, examples.bank()
        self.name = plain.embed(torch.tensor(examples.rows[0].tokens.ids)).to(self.prompt)
        slots = range(len(self.name) + len(self.prompt))
        self.rows = [Row(Tokens(()), slots, each.paths) for each in examples.rows]

    def hidden(self, places: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """Of the one set."""
        rows = [self.rows[i] for i in places[0]]
        reading = self.backbone.prepare(rows)
        extent = Extent.of(rows, self.backbone.device)
        bank = torch.cat([self.name, self.prompt])
        return [self.backbone.hidden(replace(reading, extent=extent), bank)]


def _share_a_pass(device: torch.device) -> bool:
    """Whether pseudo-samples are read beside the task's examples."""
    return device.type == "cuda"


def _reads_texts_once(view: Backbone, plain: Backbone) -> bool:
    """Whether texts are read once for all steps; a card records whole passes, each with all that it reads."""
    if plain.device.type != "cpu" or view.recorded:
        return False
    return plain.remembers_prompts and plain.reads_lines


def _first_tokens(parts: Sequence[Examples]) -> Examples:
    """All examples of several tasks as those of one, answered by their first tokens."""
    tokens = [each for part in parts for each in part.tokens]
    answers = [part.answers.sequences[label][:1] for part in parts for label in part.labels]
    return Examples(
        parts[0].backbone, AnswerSet.build(answers), None, tokens, range(len(tokens)), parts[0].prompt
    )  # fmt: skip
