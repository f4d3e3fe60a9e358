"""Q-tuning (Guo et al., 2024, arXiv 2404.14607): a queue of prompts, reweighed for each new task.

Algorithm 1 of the paper, one task at a time: trim the queue if it is full (Eq. 4), add a new prompt
(Eq. 5), train it with the scale and the shared prefix on the task (Eq. 8) and, once prompts are being
evicted, on retention (Eq. 9 or 18), weighed by the memory factor (Eq. 10).

Relations: with the scale fixed at 1, no shared prefix, no eviction and newest-first order this is
ProgPrompt; with a queue of one it is the per-task prompt (see `prompting.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qtuning.backbones import Backbone, Head, Row, Tokens
from qtuning.config import MethodSettings, TrainSettings
from qtuning.lanes import Report, fit_lanes
from qtuning.methods import PROMPT_GRID, MethodInfo, register
from qtuning.objectives import make_discriminator
from qtuning.prompts import compose, make_mlp, residual_mlp, sample_vocabulary_rows
from qtuning.queue import PromptQueue
from qtuning.scoring import read_all
from qtuning.seeding import torch_generator
from qtuning.snapshots import Snapshot, TaskCard, added
from qtuning.tasks import Split, Task
from qtuning.tensors import part
from qtuning.warm_start import check_warm_start, find_start


@dataclass(frozen=True)
class QState:
    """What a run carries from task to task. A value: learning returns a new one."""

    seed: int
    queue: PromptQueue
    shared_prefix: Tensor
    """[s, d] before its MLP, theta* of the paper."""
    shared_mlp: dict[str, Tensor]
    """Weights of the shared prefix's MLP, which is kept across tasks; empty without one."""
    last_layout: Tensor
    """[rows, d] of the latest task: [theta*, W o Q] of task i - 1, the teacher of retention (A6)."""
    learnt: int = 0
    snapshots: dict[str, Snapshot] = field(default_factory=dict)

    def current_layout(self) -> Tensor:
        """[theta*; queue] as of today, unscaled: the diagnostic answer to "what does the queue itself keep?"."""
        latest = self.last_layout[: len(self.shared_prefix)]
        return torch.cat([latest, self.queue.in_order().to(latest)])

    def with_shared(self, rows: Tensor) -> Tensor:
        """A task's rows [n, d] with today's shared prefix in place of the one it was trained with."""
        count = len(self.shared_prefix)
        return torch.cat([self.last_layout[:count].to(rows), rows[count:]])


class QTuning:
    """The method, bound to a backbone and its settings."""

    state_class = QState

    def __init__(self, backbone: Backbone, settings: MethodSettings, train: TrainSettings):
        check_warm_start(backbone, settings)
        self.backbone, self.settings, self.train = backbone, settings, train

    def start(self, seed: int) -> QState:
        """An empty queue, and a shared prefix drawn from the vocabulary."""
        backbone, settings = self.backbone, self.settings
        if settings.eviction != "none":  # a full queue must fit, or the stream would end half way
            backbone.room_for_text(
                settings.shared_length + settings.prompt_length * settings.queue_size
            )
        queue = PromptQueue.empty(
            backbone.embed_dim,
            settings.prompt_length,
            settings.queue_size,
            settings.eviction,
            settings.keep_mean,
            settings.newest_first,
            backbone.lane_dtype,
        )
        if settings.fill_queue:
            count = settings.prompt_length * (settings.queue_size - 1)
            drawn = sample_vocabulary_rows(
                backbone.embed, backbone.vocabulary, count, torch_generator(seed, "queue")
            )
            queue = replace(queue, rows=drawn.to("cpu", backbone.lane_dtype))
        generator = torch_generator(seed, "shared-prefix")
        shared = sample_vocabulary_rows(
            backbone.embed, backbone.vocabulary, settings.shared_length, generator
        )
        shared = shared.to("cpu", backbone.lane_dtype)
        mlp: dict[str, Tensor] = {}
        layout = shared.clone()
        if settings.mlp and settings.shared_length:
            mlp = make_mlp(backbone.embed_dim, settings.mlp_hidden, generator, backbone.lane_dtype)
            layout = residual_mlp(shared, mlp)
        return self.state_class(seed, queue, shared, mlp, last_layout=layout)

    def learn(
        self, state: QState, task: Task, split: Split, report: Report | None = None
    ) -> QState:
        """The state after one more task: a pack of one lane."""
        lane = self.lane(state, task, split)
        facts = fit_lanes(self.backbone, [lane], self.train, report)[0]
        return lane.finish(facts)

    def pack(self, state: QState) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a later task needs, as tensors and JSON; snapshots are kept apart."""
        mlp = {f"shared_mlp.{key}": tensor for key, tensor in state.shared_mlp.items()}
        tensors = {
            "queue": state.queue.rows,
            "shared_prefix": state.shared_prefix,
            "last_layout": state.last_layout,
        }
        return {**tensors, **mlp}, {"learnt": state.learnt, "seed": state.seed}

    def unpack(
        self, tensors: dict[str, Tensor], facts: dict[str, Any], snapshots: dict[str, Snapshot]
    ) -> QState:
        """The state that `pack` described."""
        fresh = self.start(facts["seed"])
        return self.state_class(
            seed=facts["seed"],
            queue=replace(fresh.queue, rows=tensors["queue"]),
            shared_prefix=tensors["shared_prefix"],
            shared_mlp=part(tensors, "shared_mlp"),
            last_layout=tensors["last_layout"],
            learnt=facts["learnt"],
            snapshots=snapshots,
        )

    def lane(self, state: QState, task: Task, split: Split) -> QTuningLane:
        """This task as a lane, to be fitted alone or in a pack."""
        return QTuningLane(self.backbone, self.settings, state, task, split)


class QTuningLane:
    """One run learning one task: its trained and fixed tensors, and the layout they make."""

    def __init__(
        self,
        backbone: Backbone,
        settings: MethodSettings,
        state: QState,
        task: Task,
        split: Split,
    ):
        self.backbone, self.settings, self.state = backbone, settings, state
        self.card = TaskCard.of(task)
        self.task, self.metric, self.sizes = task.name, task.metric, split.sizes
        self.name = f"{task.name}, seed {state.seed}"
        self.order = self._generator("order")
        self.evicting = state.queue.is_full
        self.queue = state.queue.with_room(self._generator("eviction"))
        words = [self.card.label_words[name] for name in self.card.label_names]
        self.answers = backbone.answers(words)
        self.start = find_start(backbone, settings, state.snapshots, split, self.answers)
        """Where the new prompt starts."""
        self._make_tensors()
        rows, longest = len(self.layout(self.tensors)), self.answers.longest
        self.train: Sequence[Tokens] = backbone.tokenize(split.train.texts, rows, longest)
        self.train_labels: Sequence[int] = split.train.labels
        self.validation: Sequence[Tokens] = backbone.tokenize(split.validation.texts, rows, longest)
        self.validation_labels: Sequence[int] = split.validation.labels
        self._make_retention()

    # ── what is trained ──────────────────────────────────────────────────────────────────────

    def _generator(self, purpose: str) -> torch.Generator:
        return torch_generator(self.state.seed, self.state.learnt, self.task, purpose)

    def _make_tensors(self) -> None:
        backbone, settings = self.backbone, self.settings
        dim, dtype = backbone.embed_dim, backbone.lane_dtype
        queue_rows = self.queue.in_order()
        self.trained: dict[str, Tensor] = {}
        """Tensors the engine moves, by name; the first word is the learning-rate group (see `stack.GROUPS`)."""
        self.fixed: dict[str, Tensor] = {}
        (self.trained if settings.thaw else self.fixed)["queue_rows"] = queue_rows
        # every task begins with W = 1: after a trim, rows have no counterpart in the last task (A4)
        scale = {
            "u.queue": torch.full((len(queue_rows),), settings.old_scale),
            "u.prompt": torch.ones(settings.prompt_length),
            "v": torch.ones(dim),
        }
        shared = {"shared": self.state.shared_prefix}
        shared |= {f"shared_mlp.{key}": tensor for key, tensor in self.state.shared_mlp.items()}
        first_or_evicting = self.state.learnt == 0 or self.evicting
        self.trains_shared = settings.shared_length > 0 and (
            settings.shared_schedule == "all" or first_or_evicting
        )
        self.trained["prompt"] = self._first_prompt()
        (self.trained if settings.scale else self.fixed).update(scale)
        (self.trained if self.trains_shared else self.fixed).update(shared)
        if settings.mlp:
            weights = make_mlp(dim, settings.mlp_hidden, self._generator("mlp"), dtype)
            self.trained |= {f"mlp.{key}": tensor for key, tensor in weights.items()}
        if backbone.needs_head:
            bound = backbone.hidden_dim**-0.5
            weight = torch.empty(len(self.card.label_names), backbone.hidden_dim, dtype=dtype)
            weight.uniform_(-bound, bound, generator=self._generator("head"))
            self.trained |= {"head.weight": weight, "head.bias": torch.zeros(len(weight))}
        for tensors in (self.trained, self.fixed):
            for name, tensor in tensors.items():
                tensors[name] = tensor.detach().clone().to(backbone.device, dtype)

    def _first_prompt(self) -> Tensor:
        """[l, d] that training starts from: drawn from the vocabulary, or the source's own prompt."""
        settings = self.settings
        if self.start.source is None:
            return sample_vocabulary_rows(
                self.backbone.embed,
                self.backbone.vocabulary,
                settings.prompt_length,
                self._generator("prompt"),
            )
        first = settings.shared_length if settings.newest_first else -settings.prompt_length
        return self.start.source.rows[first:][: settings.prompt_length]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Trained and fixed."""
        return {**self.fixed, **self.trained}

    # ── what stands before the text ──────────────────────────────────────────────────────────

    def prompt_rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """[..., l, d] of the current task, through its MLP where there is one."""
        weights = part(tensors, "mlp")
        return residual_mlp(tensors["prompt"], weights) if weights else tensors["prompt"]

    def shared_rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """[..., s, d] of the shared prefix, through its MLP where there is one."""
        weights = part(tensors, "shared_mlp")
        return residual_mlp(tensors["shared"], weights) if weights else tensors["shared"]

    def layout(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """[theta*; W o (queue, prompt)], the conditioning of Eq. 8: [..., rows, d].

        A pure function of the tensors, which may be those of many lanes, stacked: with leading
        dimensions, and queues padded to the longest.
        """
        return compose(
            self.shared_rows(tensors),
            tensors["queue_rows"],
            self.prompt_rows(tensors),
            tensors["u.queue"],
            tensors["u.prompt"],
            tensors["v"],
            scale_prompt=self.settings.scale_new_prompt,
            newest_first=self.settings.newest_first,
        )

    def slots(self, longest_queue: int) -> list[int]:
        """Where this lane's rows stand in a layout whose queue was padded to that many rows."""
        shared, prompt = self.settings.shared_length, self.settings.prompt_length
        before = prompt if self.settings.newest_first else 0
        queue = range(shared + before, shared + before + len(self.queue.rows))
        after = shared + (0 if self.settings.newest_first else longest_queue)
        new = range(after, after + prompt)
        old_and_new = [*new, *queue] if self.settings.newest_first else [*queue, *new]
        return [*range(shared), *old_and_new]

    @property
    def structure(self) -> tuple[Any, ...]:
        """Lanes that agree in this can be stacked."""
        kind = self.settings.retention if self.teacher is not None else None
        names = tuple(sorted(self.trained))
        return (names, self.settings, kind)

    # ── memory retention ─────────────────────────────────────────────────────────────────────

    def _make_retention(self) -> None:
        """Run the frozen teacher once: its read-outs for every training example are kept (A12)."""
        settings, backbone = self.settings, self.backbone
        self.teacher: Tensor | None = None
        """[examples, t, h]."""
        active = settings.retention != "none" and settings.memory_factor > 0
        if not (active and self.evicting and self.trains_shared):
            return
        bank = self.state.last_layout.to(backbone.device)
        slots = range(len(bank))  # one object, so that the rows are known to share a prompt
        rows = [
            Row(tokens, slots, (self.answers.sequences[label][:-1],))
            for tokens, label in zip(self.train, self.train_labels, strict=True)
        ]
        self.teacher = read_all(backbone, rows, bank)
        if settings.retention == "jsd":
            used = sorted({token for sequence in self.answers.sequences for token in sequence})
            columns = torch.tensor(used, device=backbone.device)
            self.fixed |= {"columns": columns, "is_column": torch.ones_like(columns)}
            weights = make_discriminator(
                len(used), self._generator("discriminator"), backbone.lane_dtype
            )
            self.trained |= {
                f"discriminator.{key}": tensor.to(backbone.device)
                for key, tensor in weights.items()
            }

    # ── the end of the task ──────────────────────────────────────────────────────────────────

    def finish(self, facts: dict[str, float]) -> QState:
        """Bake the MLP, append the raw prompt to the queue (A7), take the snapshot."""
        state = self.state
        own = {name: tensor.detach().cpu() for name, tensor in self.tensors.items()}
        layout = self.layout(own).clone()
        head = part(own, "head")
        recorded = {
            **facts,
            "seed": state.seed,
            "split": self.sizes,
            "rows": len(layout),
            "evicted": self.evicting,
            **({"source": self.start.source.card.name} if self.start.source else {}),
            **({"source_cost": self.start.cost} if self.start.cost is not None else {}),
            "scale_u": [*own["u.queue"].tolist(), *own["u.prompt"].tolist()],
        }
        snapshot = Snapshot(
            self.card, layout, Head(**{k: t.clone() for k, t in head.items()}) if head else None, recorded
        )  # fmt: skip
        keeps = self.settings.keep_prompts
        return replace(
            state,
            queue=self.queue.append(self.prompt_rows(own)) if keeps else state.queue,
            shared_prefix=own["shared"].clone(),
            shared_mlp={key: tensor.clone() for key, tensor in part(own, "shared_mlp").items()},
            last_layout=layout,
            learnt=state.learnt + 1,
            snapshots=added(state.snapshots, snapshot),
        )


register(
    MethodInfo(
        name="q-tuning",
        description="queue of frozen prompts with DQ-PCA eviction, rank-one scale, shared prefix, retention",
        paper="Guo et al., 2024, arXiv 2404.14607",
        make=QTuning,
        grid=PROMPT_GRID,
    )
)
