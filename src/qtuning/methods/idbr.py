"""IDBR (Huang et al., 2021): what a text says is split into what all tasks share and what is the task's own.

A general and a specific encoder, tanh of a linear layer each, read the model's feature; the classifier reads
both. A next-sentence loss teaches the general one, a loss on which task a text is from the specific one.
From the second task on both are held near the features they gave before the task: mean squared error,
weighed `idbr_strength` on new texts and ten times that on replayed ones (Eq. 7 to 10 of that paper). Which texts
are kept is decided by k-means: those nearest to the centres.

Relations: `replay` with two encoders, two more losses and a penalty on moving features. The released code
has one classifier for all tasks; here every task has its head, as for all methods, because the task is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qtuning.backbones import Backbone, Head, Reading
from qtuning.backbones.encoder import EncoderBackbone
from qtuning.config import MethodSettings, TrainSettings
from qtuning.errors import ConfigError
from qtuning.methods import REPLAY_GRID, MethodInfo, register
from qtuning.methods.finetuning import Lesson, WeightState
from qtuning.methods.replaying import WithMemory, kept_texts, recall
from qtuning.seeding import derive_seed, torch_generator
from qtuning.tasks import Rows, Text
from qtuning.weights import Examples, Groups, Hooks, read_weights, trainable_copy

WIDTH = 128
"""Of each of the two features."""
MOST_TASKS = 512
"""Outputs of the classifier that tells tasks apart."""
ON_REPLAY = 10.0
"""How much stronger features are held on replayed texts."""


class Disentangled(EncoderBackbone):
    """An encoder that reads out the general and the specific feature, [n, 1, 256]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        width = int(self.model.config.hidden_size)
        sizes = {"general": WIDTH, "specific": WIDTH, "next": 2, "task": MOST_TASKS}
        self.parts = torch.nn.ModuleDict()
        for name, outer in sizes.items():
            inner = WIDTH if name in ("next", "task") else width
            self.parts[name] = _linear(inner, outer, torch_generator("idbr", name))
        # a part of the model, so that its weights are trained, kept and put back like all others
        self.model.add_module("idbr", self.parts.to(self.device, self.dtype))

    @property
    def hidden_dim(self) -> int:
        """General and specific."""
        return 2 * WIDTH

    def hidden(self, reading: Reading, bank: Tensor) -> Tensor:
        """[n, 1, 256]."""
        states = super().hidden(reading, bank)
        return torch.cat([torch.tanh(self.parts[n](states)) for n in ("general", "specific")], -1)


def _linear(inner: int, outer: int, generator: torch.Generator) -> torch.nn.Linear:
    layer = torch.nn.Linear(inner, outer)
    with torch.no_grad():
        layer.weight.uniform_(-(inner**-0.5), inner**-0.5, generator=generator)
        layer.bias.zero_()
    return layer


def next_sentence_rows(texts: Sequence[Text], generator: torch.Generator) -> Rows:
    """Texts cut in two: n pairs of halves that belong together (label 0), then n that do not (label 1)."""
    halves = []
    for text in texts:
        words = (" ".join(text) if isinstance(text, tuple) else text).split()
        middle = max(1, len(words) // 2)
        halves.append((" ".join(words[:middle]), " ".join(words[middle:]) or words[-1]))
    shift = 1 + int(torch.randint(max(1, len(texts) - 1), (1,), generator=generator))
    others = [halves[(i + shift) % len(halves)][1] for i in range(len(halves))]
    wrong = [(first, other) for (first, _), other in zip(halves, others, strict=True)]
    return Rows((*halves, *wrong), (0,) * len(halves) + (1,) * len(halves))


def feature_penalty(now: Tensor, before: Tensor) -> Tensor:
    """Half the mean squared error of the general feature and half that of the specific one, [n, 256] each."""
    general, specific = slice(WIDTH), slice(WIDTH, None)
    terms = [F.mse_loss(now[:, part], before[:, part]) for part in (general, specific)]
    return 0.5 * torch.stack(terms).sum()


def kmeans_choice(features: Tensor, count: int, seed: int) -> list[int]:
    """Places of the rows [n, h] nearest to the centres of `count` clusters, all different."""
    try:
        from sklearn.cluster import KMeans
    except ImportError:
        raise ConfigError("idbr needs scikit-learn: pip install 'qtuning[bench]'.") from None
    values = features.double().cpu().numpy()
    centres = KMeans(count, n_init=10, random_state=seed % 2**32).fit(values).cluster_centers_
    chosen: list[int] = []
    for centre in centres:
        order = ((values - centre) ** 2).sum(axis=1).argsort(kind="stable").tolist()
        chosen.append(next(i for i in order if i not in chosen))
    return sorted(chosen)


@dataclass(frozen=True)
class Studied:
    """Examples of one task with what IDBR needs of them."""

    examples: Examples
    pairs: Examples
    before: Tensor | None
    """[n, 256] features before the present task; none before the first."""
    number: int
    """Of the task in the stream."""

    def next_loss(self, batch: Sequence[int], generator: torch.Generator) -> Tensor:
        """Whether two halves belong together, from the general feature; true and false pairs by a coin."""
        wrong = torch.randint(2, (len(batch),), generator=generator).tolist()
        places = [i + w * len(self.examples) for i, w in zip(batch, wrong, strict=True)]
        general = self.pairs.hidden(places)[:, 0, :WIDTH]
        logits = self._parts["next"](general)
        return F.cross_entropy(logits, torch.tensor(wrong, device=logits.device))

    def task_loss(self, batch: Sequence[int]) -> Tensor:
        """Which task the texts are from, from the specific feature."""
        logits = self._parts["task"](self.examples.hidden(batch)[:, 0, WIDTH:])
        return F.cross_entropy(logits, torch.full((len(batch),), self.number, device=logits.device))

    def held(self, batch: Sequence[int]) -> Tensor:
        """How far the features have moved."""
        if self.before is None:
            return torch.zeros((), device=self.examples.backbone.device)
        index = torch.tensor(list(batch), device=self.before.device)
        return feature_penalty(self.examples.hidden(batch)[:, 0], self.before[index])

    @property
    def _parts(self) -> Any:
        return self.examples.backbone.model.idbr


class IDBRHooks(Hooks):
    """Next-sentence loss and held features in every step; every few steps a replay, with the task loss too."""

    def __init__(
        self,
        new: Studied,
        old: Sequence[Studied],
        settings: MethodSettings,
        batch: int,
        generator: torch.Generator,
    ):
        self.new, self.old, self.settings = new, old, settings
        self.batch, self.generator = batch, generator

    def penalty(self, batch: Sequence[int]) -> Tensor | None:
        """Beside the classifier's loss."""
        held = self.settings.idbr_strength * self.new.held(batch)
        return self.new.next_loss(batch, self.generator) + held

    def after_step(self, step: int, optimiser: torch.optim.Optimizer) -> None:
        """Replay, when it is time: a batch of each old task, and as many new texts for the task loss."""
        if step % self.settings.replay_every:
            return
        for old in self.old:
            places = self._draw(old)
            loss = old.examples.loss(places) + old.next_loss(places, self.generator)
            loss = loss + 0.5 * (old.task_loss(places) + self.new.task_loss(self._draw(self.new)))
            loss = loss + ON_REPLAY * self.settings.idbr_strength * old.held(places)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    def _draw(self, studied: Studied) -> list[int]:
        count = len(studied.examples)
        return torch.randperm(count, generator=self.generator)[: self.batch].tolist()


class IDBR(WithMemory):
    """The method, bound to a backbone and its settings."""

    def __init__(self, backbone: Backbone, settings: MethodSettings, train: TrainSettings):
        super().__init__(backbone, settings, train)
        self.worker = trainable_copy(backbone, Disentangled)
        self.original = read_weights(self.worker)

    def hooks(self, state: WeightState, lesson: Lesson) -> Hooks:
        """Features are read before the first step of the task."""
        generator = torch_generator(state.seed, state.learnt, "memory")
        is_first = not state.memory
        new = self._study(lesson.train, lesson.split.train.texts, state.learnt, generator, is_first)
        old = []
        for number, (name, kept) in enumerate(state.memory.items()):
            examples = recall(self.worker, kept, lesson.heads.get(name))
            old.append(self._study(examples, kept_texts(kept), number, generator, is_first))
        return IDBRHooks(new, old, self.settings, self.train.batch_size, generator)

    def groups(self, heads: Sequence[Head]) -> Groups:
        """What is new to the model learns as fast as the heads."""
        parts = self.worker.model.idbr
        own = {id(p) for p in parts.parameters()}
        rest = [p for p in self.worker.model.parameters() if id(p) not in own]
        outer = [tensor for head in heads for tensor in (head.weight, head.bias)]
        return [
            (rest, self.train.weights_lr),
            ([*parts.parameters(), *outer], self.train.head_lr),
        ]

    def choose(self, state: WeightState, lesson: Lesson) -> list[int]:
        """As many as `replay` keeps, but by k-means."""
        count = len(super().choose(state, lesson))
        seed = derive_seed(state.seed, state.learnt, lesson.task.name, "memory")
        return kmeans_choice(self._features(lesson.train), count, seed)

    def _study(
        self,
        examples: Examples,
        texts: Sequence[Text],
        number: int,
        generator: torch.Generator,
        is_first: bool,
    ) -> Studied:
        rows = next_sentence_rows(texts, generator)
        answers = self.worker.answers(["next", "other"])
        tokens = self.worker.tokenize(rows.texts, 0)
        pairs = Examples(self.worker, answers, None, tokens, rows.labels)
        before = None if is_first else self._features(examples)
        return Studied(examples, pairs, before, min(number, MOST_TASKS - 1))

    @torch.no_grad()
    def _features(self, examples: Examples) -> Tensor:
        size = self.train.batch_size
        starts = range(0, len(examples), size)
        found = [
            examples.hidden(range(i, min(i + size, len(examples))))[:, 0] for i in starts
        ]  # fmt: skip
        return torch.cat(found)


register(
    MethodInfo(
        name="idbr",
        description="fine-tuning with general and specific features, held and replayed; memory by k-means",
        paper="Huang et al., 2021, arXiv 2104.05489",
        make=IDBR,
        families=("encoder",),
        forgets=True,
        stores_data=True,
        packable=False,
        grid=REPLAY_GRID,
    )
)
