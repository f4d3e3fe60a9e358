"""MBPA++ (de Masson d'Autume et al., 2019): a memory that is replayed a little, and looked up for every text.

Every training example is stored under a key, the frozen backbone's feature of its text. Every `replay_every`
steps one batch drawn from the whole memory is trained on. To answer a text, the weights are adapted to its
nearest neighbours, by exact Euclidean distance, with `local_steps` gradient steps on
`local_penalty` ||W - W_base||^2 - sum_k 1/K log p(y_k | x_k; W) (Eq. 4 of that paper), and put back afterwards.

Relations: `replay` with everything kept and less of it replayed, and with local adaptation. The released
code takes a dot product for the distance and loses the base weights; this follows the paper. Answers take
`local_steps` training steps per text, so a run measures the last row of its matrix only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qtuning.backbones import Backbone, Head
from qtuning.config import MethodSettings, TrainSettings
from qtuning.graphs import repeat
from qtuning.keys import read_features
from qtuning.methods import MethodInfo, register
from qtuning.methods.finetuning import Lesson, WeightState, trainable
from qtuning.methods.replaying import Together, WithMemory, recall
from qtuning.snapshots import Snapshot
from qtuning.tasks import Text
from qtuning.weights import Examples, Hooks


def nearest(key: Tensor, keys: Tensor, count: int) -> list[int]:
    """Places of the keys [n, h] nearest to a key [h], nearest first."""
    distance = (keys - key).square().sum(dim=-1)
    return distance.argsort(stable=True)[:count].tolist()


class SparseReplayHooks(Hooks):
    """Every few steps one batch drawn from all earlier examples alike, with a step of its own."""

    def __init__(
        self, memories: Sequence[Examples], every: int, batch: int, generator: torch.Generator
    ):
        self.memories, self.every, self.batch, self.generator = memories, every, batch, generator
        self.where = [(m, i) for m, memory in enumerate(memories) for i in range(len(memory))]

    def after_step(self, step: int, optimiser: torch.optim.Optimizer) -> None:
        """Replay, when it is time."""
        if step % self.every or not self.where:
            return
        drawn = torch.randperm(len(self.where), generator=self.generator)[: self.batch].tolist()
        optimiser.zero_grad()
        Together(self.memories, [self.where[i] for i in drawn]).mean_loss().backward()  # type: ignore[no-untyped-call]
        optimiser.step()


@dataclass(frozen=True)
class MBPAState(WeightState):
    """Weights, everything seen, and its keys."""

    frozen: Backbone | None = field(default=None, repr=False, compare=False)
    """The key network."""
    settings: MethodSettings = field(default_factory=MethodSettings)

    @contextmanager
    def adapted(self, name: str, text: Text) -> Iterator[tuple[Backbone, Snapshot]]:
        """A task's model and head, adapted to one text; afterwards the weights are what they were."""
        model, snapshot = self.answers(self.worker, name)
        heads = {task: trainable(head, self.worker.device) for task, head in self.heads.items()}
        neighbours = self._neighbours(text, heads)
        own = [*model.model.parameters(), *(t for h in heads.values() for t in (h.weight, h.bias))]
        base = [tensor.detach().clone() for tensor in own]
        rate, pull = self.settings.local_lr, 2 * self.settings.local_penalty

        def step() -> None:
            loss = neighbours.mean_loss()
            found = torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True)
            with torch.no_grad():  # all tensors in one launch: there are hundreds of them
                away = torch._foreach_sub(own, base)
                steps = torch._foreach_add(found, away, alpha=pull)
                torch._foreach_add_(own, steps, alpha=-rate)

        try:
            with self.worker.training_layers():
                repeat(step, self.settings.local_steps, self.worker.device)
            head = heads.get(name)
            yield model, replace(snapshot, head=head.detached()) if head else snapshot
        finally:
            with torch.no_grad():
                torch._foreach_copy_(own, base)

    def _neighbours(self, text: Text, heads: dict[str, Head]) -> Together:
        """The nearest stored examples, of whichever tasks."""
        assert self.frozen is not None
        names = list(self.memory)
        keys = torch.cat([self.extra[f"keys.{task}"] for task in names])
        owner = [
            (m, i) for m, task in enumerate(names) for i in range(len(self.extra[f"keys.{task}"]))
        ]
        key = read_features(self.frozen, [text])[0].to(keys)
        chosen = [owner[i] for i in nearest(key, keys, self.settings.neighbours)]
        memories: list[Examples] = []
        where: list[tuple[int, int]] = []
        for m in dict.fromkeys(m for m, _ in chosen):
            kept, places = self.memory[names[m]], [i for n, i in chosen if n == m]
            few = {
                **kept,
                "texts": [kept["texts"][i] for i in places],
                "labels": [kept["labels"][i] for i in places],
            }
            where += [(len(memories), i) for i in range(len(places))]
            memories.append(recall(self.worker, few, heads.get(names[m])))
        return Together(memories, where)


class MBPA(WithMemory):
    """The method, bound to a backbone and its settings."""

    def __init__(self, backbone: Backbone, settings: MethodSettings, train: TrainSettings):
        super().__init__(backbone, replace(settings, replay_share=1.0), train)

    def start(self, seed: int) -> MBPAState:
        """The pretrained weights, and an empty memory."""
        return MBPAState(seed, self.worker, frozen=self.backbone, settings=self.settings)

    def use(self, memories: Sequence[Examples], generator: torch.Generator) -> Hooks:
        """Sparse replay."""
        every, batch = self.settings.replay_every, self.train.batch_size
        return SparseReplayHooks(memories, every, batch, generator)

    def after(self, state: WeightState, lesson: Lesson, facts: dict[str, float]) -> WeightState:
        """Store every example under its key."""
        new = super().after(state, lesson, facts)
        kept = lesson.split.train.at(self.choose(state, lesson))
        keys = read_features(self.backbone, kept.texts).float()
        return replace(new, extra={**state.extra, f"keys.{lesson.task.name}": keys})


register(
    MethodInfo(
        name="mbpa++",
        description="fine-tuning with sparse replay; every text is answered after adapting to its neighbours",
        paper="de Masson d'Autume et al., 2019, arXiv 1906.01076",
        make=MBPA,
        forgets=True,
        stores_data=True,
        packable=False,
        grid={"weights_lr": (0.3, 1.0, 3.0), "local_lr": (1.0, 10.0)},
    )
)
