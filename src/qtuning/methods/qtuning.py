"""Q-tuning (Guo et al., 2024, arXiv 2404.14607): a queue of prompts, reweighed for each new task.

Algorithm 1 of the paper, one task at a time: trim the queue if it is full (Eq. 4), add a new prompt
(Eq. 5), train it with the scale and the shared prefix on the task (Eq. 8) and, once prompts are being
evicted, on retention (Eq. 9 or 18), weighed by the memory factor (Eq. 10).

Relations: with the scale fixed at 1, no shared prefix, no eviction and newest-first order this is
ProgPrompt; with a queue of one it is the per-task prompt (see `prompting.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qtuning.backbones import Backbone, Head, Row, Tokens
from qtuning.config import MethodSettings, TrainSettings
from qtuning.lanes import Report, Request, fit_lanes
from qtuning.methods import MethodInfo, register
from qtuning.objectives import (
    IGNORE,
    Discriminator,
    cross_entropy,
    jsd_retention,
    kl_retention,
    label_scores,
)
from qtuning.prompts import ResidualMLP, compose, sample_vocabulary_rows
from qtuning.queue import PromptQueue
from qtuning.scoring import Answerer, batches_by_length
from qtuning.seeding import torch_generator
from qtuning.snapshots import Snapshot, TaskCard, added
from qtuning.tasks import Split, Task


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


class QTuning:
    """The method, bound to a backbone and its settings."""

    def __init__(self, backbone: Backbone, settings: MethodSettings, train: TrainSettings):
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
        generator = torch_generator(seed, "shared-prefix")
        shared = sample_vocabulary_rows(
            backbone.embed, backbone.vocabulary(), settings.shared_length, generator
        )
        shared = shared.to("cpu", backbone.lane_dtype)
        mlp: dict[str, Tensor] = {}
        layout = shared.clone()
        if settings.mlp and settings.shared_length:
            fresh = ResidualMLP(
                backbone.embed_dim, settings.mlp_hidden, generator, backbone.lane_dtype
            )
            mlp = dict(fresh.state_dict())
            layout = fresh(shared).detach()
        return QState(seed, queue, shared, mlp, last_layout=layout)

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
        mlp = {
            k.removeprefix("shared_mlp."): t
            for k, t in tensors.items()
            if k.startswith("shared_mlp.")
        }
        fresh = self.start(facts["seed"])
        return QState(
            seed=facts["seed"],
            queue=replace(fresh.queue, rows=tensors["queue"]),
            shared_prefix=tensors["shared_prefix"],
            shared_mlp=mlp,
            last_layout=tensors["last_layout"],
            learnt=facts["learnt"],
            snapshots=snapshots,
        )

    def lane(self, state: QState, task: Task, split: Split) -> QTuningLane:
        """This task as a lane, to be fitted alone or in a pack."""
        return QTuningLane(self.backbone, self.settings, state, task, split)


class QTuningLane:
    """One run learning one task: its trainable tensors, and the requests they make of the engine."""

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
        self._make_trainable()
        words = [self.card.label_words[name] for name in self.card.label_names]
        self.answers = backbone.answers(words)
        rows, longest = len(self.layout()), self.answers.longest
        self.train = backbone.tokenize(split.train.texts, rows, longest)
        self.train_labels = split.train.labels
        self.train_size = len(self.train)
        self.validation: Sequence[Tokens] = backbone.tokenize(split.validation.texts, rows, longest)
        self.validation_labels: Sequence[int] = split.validation.labels
        used = sorted({token for sequence in self.answers.sequences for token in sequence})
        self.label_columns = torch.tensor(used, device=backbone.device)
        self._make_retention()

    # ── what is trained ──────────────────────────────────────────────────────────────────────

    def _generator(self, purpose: str) -> torch.Generator:
        return torch_generator(self.state.seed, self.state.learnt, self.task, purpose)

    def _trainable(self, tensor: Tensor) -> Tensor:
        return (
            tensor.detach()
            .clone()
            .to(self.backbone.device, self.backbone.lane_dtype)
            .requires_grad_()
        )

    def _make_trainable(self) -> None:
        backbone, settings = self.backbone, self.settings
        dim, dtype = backbone.embed_dim, backbone.lane_dtype
        self.prompt = self._trainable(
            sample_vocabulary_rows(
                backbone.embed,
                backbone.vocabulary(),
                settings.prompt_length,
                self._generator("prompt"),
            )
        )
        self.queue_rows = self.queue.in_order().to(backbone.device)
        # every task begins with W = 1: after a trim, rows have no counterpart in the last task (A4)
        self.u = self._trainable(torch.ones(len(self.queue_rows) + settings.prompt_length))
        self.v = self._trainable(torch.ones(dim))
        for vector in (self.u, self.v):
            vector.requires_grad_(settings.scale)
        self.shared = self._trainable(self.state.shared_prefix)
        first_or_evicting = self.state.learnt == 0 or self.evicting
        self.trains_shared = settings.shared_length > 0 and (
            settings.shared_schedule == "all" or first_or_evicting
        )
        self.mlp = self.shared_mlp = None
        if settings.mlp:
            new = ResidualMLP(dim, settings.mlp_hidden, self._generator("mlp"), dtype)
            self.mlp = new.to(backbone.device)
        if self.state.shared_mlp:
            kept = ResidualMLP(dim, settings.mlp_hidden, torch_generator("unused"), dtype)
            kept.load_state_dict(self.state.shared_mlp)
            self.shared_mlp = kept.to(backbone.device)
        self.head: Head | None = None
        if backbone.needs_head:
            bound = backbone.hidden_dim**-0.5
            weight = torch.empty(len(self.card.label_names), backbone.hidden_dim, dtype=dtype)
            weight.uniform_(-bound, bound, generator=self._generator("head"))
            self.head = Head(self._trainable(weight), self._trainable(torch.zeros(len(weight))))

    def parameters(self) -> dict[str, list[Tensor]]:
        """Trainable tensors by learning-rate group."""
        shared_mlp = list(self.shared_mlp.parameters()) if self.shared_mlp else []
        return {
            "prompt": [self.prompt],
            "scale": [self.u, self.v] if self.settings.scale else [],
            "shared": [self.shared] if self.trains_shared else [],
            "mlp": [
                *(self.mlp.parameters() if self.mlp else []),
                *(shared_mlp if self.trains_shared else []),
            ],
            "head": [self.head.weight, self.head.bias] if self.head else [],
            "discriminator": list(self.discriminator.parameters()) if self.discriminator else [],
        }

    # ── what stands before the text ──────────────────────────────────────────────────────────

    def prompt_rows(self) -> Tensor:
        """[l, d] of the current task, through its MLP where there is one."""
        return self.mlp(self.prompt) if self.mlp else self.prompt

    def shared_rows(self) -> Tensor:
        """[s, d] of the shared prefix, through its MLP where there is one."""
        rows = self.shared_mlp(self.shared) if self.shared_mlp else self.shared
        return rows if self.trains_shared else rows.detach()

    def layout(self) -> Tensor:
        """[theta*; W o (queue, prompt)], the conditioning of Eq. 8."""
        return compose(
            self.shared_rows(),
            self.queue_rows,
            self.prompt_rows(),
            self.u,
            self.v,
            scale_prompt=self.settings.scale_new_prompt,
            newest_first=self.settings.newest_first,
        )

    # ── what is asked of the engine ──────────────────────────────────────────────────────────

    def requests(self, batch: Sequence[int]) -> list[Request]:
        """L_Q on the task (Eq. 8) and, weighed by the memory factor, L_MR (Eq. 10)."""
        tokens = [self.train[i] for i in batch]
        paths = [self.answers.sequences[self.train_labels[i]][:-1] for i in batch]
        targets = self._targets(batch)

        def task_loss(hidden: Tensor) -> Tensor:
            return cross_entropy(self.backbone.logits(hidden, self.head), targets)

        def retention_loss(hidden: Tensor) -> Tensor:
            return self._retention(hidden, batch, targets)

        asked = [Request(self.layout(), tokens, paths, task_loss)]
        if self.teacher is not None:
            weight = self.settings.memory_factor
            asked.append(Request(self.shared_rows(), tokens, paths, retention_loss, weight))
        return asked

    def answerer(self) -> Answerer:
        """The lane as it would answer now."""
        head = self.head.detached() if self.head else None
        return Answerer(self.layout().detach(), self.answers, head)

    def _targets(self, batch: Sequence[int]) -> Tensor:
        """Gold answers [n, t], padded with IGNORE."""
        sequences = [self.answers.sequences[self.train_labels[i]] for i in batch]
        width = max(len(sequence) for sequence in sequences)
        padded = [[*sequence, *[IGNORE] * (width - len(sequence))] for sequence in sequences]
        return torch.tensor(padded, device=self.backbone.device)

    # ── memory retention ─────────────────────────────────────────────────────────────────────

    def _make_retention(self) -> None:
        """Run the frozen teacher once: its read-outs for every training example are kept (A12)."""
        settings, backbone = self.settings, self.backbone
        self.teacher: Tensor | None = None
        self.discriminator: Discriminator | None = None
        active = settings.retention != "none" and settings.memory_factor > 0
        if not (active and self.evicting and self.trains_shared):
            return
        bank = self.state.last_layout.to(backbone.device)
        rows = [
            Row(tokens, 0, len(bank), (self.answers.sequences[label][:-1],))
            for tokens, label in zip(self.train, self.train_labels, strict=True)
        ]
        kept = torch.zeros(len(rows), self.answers.longest, backbone.hidden_dim,
                           dtype=backbone.dtype, device=backbone.device)  # fmt: skip
        lengths = [len(bank) + len(row.tokens.ids) + len(row.paths[0]) for row in rows]
        with torch.no_grad():
            for batch in batches_by_length(lengths, backbone):
                hidden = backbone.hidden([rows[i] for i in batch], bank)
                kept[torch.tensor(batch, device=kept.device), : hidden.shape[1]] = hidden
        self.teacher = kept
        if settings.retention == "jsd":
            self.discriminator = Discriminator(
                len(self.label_columns), self._generator("discriminator"), backbone.lane_dtype
            ).to(backbone.device)

    def _retention(self, hidden: Tensor, batch: Sequence[int], targets: Tensor) -> Tensor:
        """L_MR: the shared prefix alone should answer as the previous state did (Eq. 9 or 18).

        The head is the current one on both sides, without gradient (A11): retention moves only the
        shared prefix, its MLP, and for `jsd` the discriminator.
        """
        assert self.teacher is not None
        head = self.head.detached() if self.head else None
        index = torch.tensor(list(batch), device=self.teacher.device)
        new = self.backbone.logits(hidden, head)
        old = self.backbone.logits(self.teacher[index, : hidden.shape[1]], head).detach()
        if self.discriminator is None:
            return kl_retention(new, old, targets)
        scores = [label_scores(each, targets, self.label_columns) for each in (new, old)]
        return jsd_retention(scores[0], scores[1], self.discriminator)

    # ── the end of the task ──────────────────────────────────────────────────────────────────

    def finish(self, facts: dict[str, float]) -> QState:
        """Bake the MLP, append the raw prompt to the queue (A7), take the snapshot."""
        state = self.state
        layout = self.layout().detach().cpu().clone()
        head = self.head and Head(
            self.head.weight.detach().cpu().clone(), self.head.bias.detach().cpu().clone()
        )
        recorded = {
            **facts,
            "seed": state.seed,
            "split": self.sizes,
            "rows": len(layout),
            "evicted": self.evicting,
            "scale_u": self.u.detach().tolist(),
        }
        snapshot = Snapshot(self.card, layout, head, recorded)
        mlp = self.shared_mlp
        return replace(
            state,
            queue=self.queue.append(self.prompt_rows().detach().cpu()),
            shared_prefix=self.shared.detach().cpu().clone(),
            shared_mlp={k: t.detach().cpu().clone() for k, t in mlp.state_dict().items()} if mlp else {},
            last_layout=layout,
            learnt=state.learnt + 1,
            snapshots=added(state.snapshots, snapshot),
        )  # fmt: skip


register(
    MethodInfo(
        name="q-tuning",
        description="queue of frozen prompts with DQ-PCA eviction, rank-one scale, shared prefix, retention",
        paper="Guo et al., 2024, arXiv 2404.14607",
        make=QTuning,
    )
)
