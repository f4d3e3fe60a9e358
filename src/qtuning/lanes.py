"""fit_lanes: any number of prompt-tuning runs through one frozen backbone, in the same passes.

A lane is one run learning one task. Each step, every lane hands in requests; the engine puts the
rows of all of them into one batch, runs the backbone once, and gives each request its read-outs
back. A lane's loss touches only its own tensors, so gradients cannot mix, and a single run is a
pack of one lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from qtuning.backbones import Backbone, Row, Tokens
from qtuning.backbones.answers import TokenIds
from qtuning.config import TrainSettings
from qtuning.errors import TrainingError
from qtuning.evaluation import score_predictions
from qtuning.scoring import Answerer, Query, score

OWN_OPTIMISER = "discriminator"
"""The learning-rate group with an optimiser of its own, outside the lane's gradient clipping."""


@dataclass(frozen=True)
class Request:
    """Examples to read under a layout of prompt vectors, and the loss on what is read."""

    layout: Tensor
    """[rows, d], attached to the lane's trainable tensors."""
    tokens: Sequence[Tokens]
    paths: Sequence[TokenIds]
    """What each example reads of its answer (all but the last token)."""
    loss: Callable[[Tensor], Tensor]
    """Read-outs [n, t, h] -> a scalar."""
    weight: float = 1.0


class Lane(Protocol):
    """All that the engine knows of a method."""

    name: str
    task: str
    metric: str
    train_size: int
    order: torch.Generator
    validation: Sequence[Tokens]
    validation_labels: Sequence[int]

    def parameters(self) -> dict[str, list[Tensor]]:
        """Trainable tensors by learning-rate group: prompt, scale, shared, mlp, head, discriminator."""
        ...

    def requests(self, batch: Sequence[int]) -> list[Request]:
        """What to compute for these training examples."""
        ...

    def answerer(self) -> Answerer:
        """The lane as it would answer now."""
        ...


@dataclass(frozen=True)
class Progress:
    """One lane after an epoch."""

    lane: str
    task: str
    epoch: int
    epochs: int
    loss: float
    validation: float | None
    best: float | None


FitState = tuple[dict[str, Tensor], dict[str, Any]]
"""Where one lane stands: tensors, and JSON for the rest."""
Report = Callable[[Progress], None]
Checkpoint = Callable[[list[FitState]], None]


RESUMED = ("epoch", "step", "pending", "losses", "best", "best_epoch", "latest", "stale", "done")
"""The plain values of a lane's training."""


@dataclass
class _Fit:
    """Where one lane stands in its training."""

    lane: Lane
    settings: TrainSettings
    optimisers: list[torch.optim.Optimizer]
    clipped: list[Tensor]
    parameters: list[Tensor]
    epoch: int = 0
    step: int = 0
    pending: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    best: tuple[float, float] = (-math.inf, -math.inf)
    best_state: list[Tensor] | None = None
    best_epoch: int = 0
    latest: float | None = None
    stale: int = 0
    done: bool = False

    def next_batch(self) -> list[int]:
        if not self.pending:
            self.pending = torch.randperm(self.lane.train_size, generator=self.lane.order).tolist()
        size = self.settings.batch_size
        batch, self.pending = self.pending[:size], self.pending[size:]
        return batch

    def export(self) -> FitState:
        """Everything that continuing needs."""
        tensors = {f"parameter.{i}": t.detach() for i, t in enumerate(self.parameters)}
        if self.best_state is not None:
            tensors |= {f"best.{i}": tensor for i, tensor in enumerate(self.best_state)}
        for o, optimiser in enumerate(self.optimisers):
            for i, entry in optimiser.state_dict()["state"].items():
                tensors |= {f"adam.{o}.{i}.{key}": tensor for key, tensor in entry.items()}
        tensors["order"] = self.lane.order.get_state()
        return tensors, {name: getattr(self, name) for name in RESUMED}

    def restore(self, saved: FitState) -> None:
        """Stand where an exported lane stood."""
        tensors, facts = saved
        for name in RESUMED:
            setattr(self, name, facts[name])
        self.best = tuple(facts["best"])
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters):
                parameter.copy_(tensors[f"parameter.{i}"])
        if "best.0" in tensors:
            best = [tensors[f"best.{i}"] for i in range(len(self.parameters))]
            self.best_state = [b.to(p.device) for b, p in zip(best, self.parameters, strict=True)]
        for o, optimiser in enumerate(self.optimisers):
            state = optimiser.state_dict()
            state["state"] = {}
            for key, tensor in tensors.items():
                if key.startswith(f"adam.{o}."):
                    _, _, number, part = key.split(".")
                    state["state"].setdefault(int(number), {})[part] = tensor.clone()
            optimiser.load_state_dict(state)
        self.lane.order.set_state(tensors["order"].cpu())

    def keep(self, quality: tuple[float, float]) -> None:
        self.latest = quality[0]
        if self.best_state is None or quality > self.best:
            self.best, self.best_epoch, self.stale = quality, self.epoch, 0
            self.best_state = [tensor.detach().clone() for tensor in self.parameters]
        else:
            self.stale += 1


def fit_lanes(
    backbone: Backbone,
    lanes: Sequence[Lane],
    settings: TrainSettings,
    report: Report | None = None,
    checkpoint: Checkpoint | None = None,
    resume: Sequence[FitState] | None = None,
) -> list[dict[str, float]]:
    """Train every lane on its task and leave it in its best state by validation.

    Args:
        backbone: The frozen model.
        lanes: What is trained, together.
        settings: How.
        report: Called for each lane after each of its epochs.
        checkpoint: Called whenever lanes end an epoch, with all that continuing needs.
        resume: What an earlier `checkpoint` was given; training goes on from there, bit for bit.

    Returns:
        For each lane its best epoch, validation score and last training loss.

    Raises:
        TrainingError: When a loss is not finite; names task, epoch, step and lane.
    """
    fits = [_begin(lane, settings) for lane in lanes]
    for fit, saved in zip(fits, resume or (), strict=bool(resume)):
        fit.restore(saved)
    while active := [fit for fit in fits if not fit.done]:
        _step(backbone, [(fit, fit.next_batch()) for fit in active])
        ended = [fit for fit in active if not fit.pending]
        for fit in ended:
            fit.epoch += 1
        _validate(backbone, [fit for fit in ended if _is_due(fit)])
        for fit in ended:
            if report:
                report(_progress(fit))
            fit.losses.clear()
            stopped = 0 < settings.patience <= fit.stale
            fit.done = stopped or fit.epoch >= settings.epochs
        if checkpoint and ended:
            checkpoint([fit.export() for fit in fits])
    return [_finish(fit) for fit in fits]


def run_requests(backbone: Backbone, requests: Sequence[Request]) -> list[Tensor]:
    """Weighted losses of all requests, from one pass over all their rows."""
    rows: list[Row] = []
    start = 0
    for request in requests:
        size = len(request.layout)
        rows += [
            Row(tokens, start, size, (path,))
            for tokens, path in zip(request.tokens, request.paths, strict=True)
        ]
        start += size
    hidden = backbone.hidden(rows, torch.cat([request.layout for request in requests]))
    losses, first = [], 0
    for request in requests:
        last = first + len(request.tokens)
        width = max(len(path) for path in request.paths) + 1
        losses.append(request.weight * request.loss(hidden[first:last, :width]))
        first = last
    return losses


def _begin(lane: Lane, settings: TrainSettings) -> _Fit:
    groups = {name: tensors for name, tensors in lane.parameters().items() if tensors}
    own = groups.pop(OWN_OPTIMISER, [])

    def adam(parts: dict[str, list[Tensor]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            [{"params": t, "lr": getattr(settings, f"{name}_lr")} for name, t in parts.items()],
            weight_decay=settings.weight_decay,
        )

    clipped = [tensor for tensors in groups.values() for tensor in tensors]
    optimisers = [adam(groups)] + ([adam({OWN_OPTIMISER: own})] if own else [])
    return _Fit(lane, settings, optimisers, clipped, clipped + own)


def _step(backbone: Backbone, work: Sequence[tuple[_Fit, list[int]]]) -> None:
    """One optimiser step of every lane, from one forward and one backward pass."""
    owners: list[_Fit] = []
    requests: list[Request] = []
    for fit, batch in work:
        asked = fit.lane.requests(batch)
        requests += asked
        owners += [fit] * len(asked)
    losses = run_requests(backbone, requests)
    per_lane: dict[int, Tensor] = {}
    for fit, loss in zip(owners, losses, strict=True):
        per_lane[id(fit)] = per_lane.get(id(fit), torch.zeros_like(loss)) + loss
    for fit, _ in work:
        value = float(per_lane[id(fit)].detach())
        fit.losses.append(value)
        fit.step += 1
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss became {value} in task {fit.lane.task!r}, epoch {fit.epoch + 1}, step {fit.step}, "
                f"lane {fit.lane.name!r}. Lower the learning rates, or use dtype fp32."
            )
    torch.stack(list(per_lane.values())).sum().backward()  # type: ignore[no-untyped-call]
    for fit, _ in work:
        if fit.settings.clip > 0:
            torch.nn.utils.clip_grad_norm_(fit.clipped, fit.settings.clip)
        for optimiser in fit.optimisers:
            optimiser.step()
            optimiser.zero_grad()


def _is_due(fit: _Fit) -> bool:
    last = fit.epoch >= fit.settings.epochs
    return last or fit.epoch % fit.settings.validate_every == 0


def _validate(backbone: Backbone, fits: Sequence[_Fit]) -> None:
    """Score all lanes' validation rows together; keep the state of each that is better.

    Equal scores are common with a few dozen rows: the likelihood of the right labels decides.
    """
    queries: list[Query] = []
    for fit in fits:
        answerer = fit.lane.answerer()
        queries += [Query(answerer, tokens) for tokens in fit.lane.validation]
    scores = score(backbone, queries)
    first = 0
    for fit in fits:
        labels = fit.lane.validation_labels
        own, first = scores[first : first + len(labels)], first + len(labels)
        if not labels:
            fit.best_state = None  # nothing to choose by: the last state stays
            continue
        predicted = [int(log_probs.argmax()) for log_probs in own]
        likelihood = sum(float(log[y]) for log, y in zip(own, labels, strict=True)) / len(labels)
        if not math.isfinite(likelihood):
            raise TrainingError(
                f"the validation likelihood became {likelihood} in task {fit.lane.task!r}, epoch {fit.epoch}, "
                f"lane {fit.lane.name!r}. Lower the learning rates, or use dtype fp32."
            )
        fit.keep((score_predictions(fit.lane.metric, labels, predicted), likelihood))


def _progress(fit: _Fit) -> Progress:
    return Progress(
        lane=fit.lane.name,
        task=fit.lane.task,
        epoch=fit.epoch,
        epochs=fit.settings.epochs,
        loss=sum(fit.losses) / len(fit.losses),
        validation=fit.latest,
        best=fit.best[0] if fit.latest is not None else None,
    )


def _finish(fit: _Fit) -> dict[str, float]:
    if fit.best_state is not None:
        with torch.no_grad():
            for tensor, kept in zip(fit.parameters, fit.best_state, strict=True):
                tensor.copy_(kept)
    found = {"epochs": float(fit.epoch), "best_epoch": float(fit.best_epoch or fit.epoch)}
    if fit.best_state is not None:
        found |= {"validation_score": fit.best[0], "validation_log_likelihood": fit.best[1]}
    return found
