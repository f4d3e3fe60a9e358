"""fit_weights: train tensors that do not travel as lanes, above all a copy of the backbone itself.

The shared backbone is never touched: a method works on `trainable_copy` of it and keeps what it learnt as a
dictionary of weights. Hooks let a method add to the loss, edit gradients, or take steps of its own.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from qtuning.backbones import AnswerSet, Backbone, Head, Row, Tokens
from qtuning.backbones.compiled import repeated_layers
from qtuning.config import TrainSettings
from qtuning.errors import TrainingError, in_a_line
from qtuning.evaluation import score_predictions
from qtuning.graphs import can_record, recording_stream
from qtuning.lanes import Progress, Report
from qtuning.objectives import IGNORE, cross_entropy
from qtuning.recorded import RecordedPasses
from qtuning.scoring import Quiz, stack_heads
from qtuning.snapshots import TaskCard
from qtuning.tasks import Rows, Task
from qtuning.tensors import cut_like

Groups = Sequence[tuple[Sequence[Tensor], float]]
"""Tensors to be trained, with learning rates."""
COMPILED = ("on", "dynamic")
"""With these the layers of weights in training are compiled at once; with `auto` they never are."""


def trainable_copy(backbone: Backbone, kind: type[Backbone] | None = None) -> Backbone:
    """A backbone of its own, with weights that take gradients; still without dropout.

    Its weights are float32 (float64 in tests) whatever the backbone's are, or small steps would be rounded away; the
    layers' products are in the backbone's number type. If its layers will be compiled, then for all lengths: those of
    batches differ.
    """
    model = copy.deepcopy(backbone.model).to(backbone.lane_dtype)
    own = (kind or type(backbone))(
        model, backbone.tokenizer, backbone.name, backbone.max_length, backbone.readout
    )
    own.compile, own.for_all_lengths = backbone.compile, True
    is_half = backbone.dtype != backbone.lane_dtype
    if is_half or own.compile in COMPILED:
        own.use_plain_layers()
    for layer in repeated_layers(model) if is_half else ():
        its: Any = type(layer)
        layer.__class__ = _with_products(its, backbone.device.type, backbone.dtype)
    own.is_frozen = False
    own.model.requires_grad_(True)
    own.recorded = recorded_passes(own, list(model.parameters()))
    return own


def recorded_passes(backbone: Backbone, weights: Sequence[Tensor]) -> RecordedPasses | None:
    """For a backbone of which these weights are trained; None where passes are not recorded."""
    if backbone.compile == "off" or not can_record(backbone.device):
        return None
    return RecordedPasses(weights, backbone.max_length)


@contextmanager
def taking_steps(backbone: Backbone) -> Iterator[None]:
    """Inside, a backbone runs as training wants it: compiled where that was decided, recorded on a card."""
    recorded = backbone.recorded
    if not recorded:
        with backbone.training_layers():
            yield
        return
    recorded.is_on = True
    try:
        with backbone.training_layers(), recording_stream(backbone.device):
            yield
    finally:
        recorded.is_on = False


@cache
def _with_products(kind: Any, device: str, dtype: torch.dtype) -> Any:
    """Layers of the same kind whose products are in that number type."""

    def forward(layer: Module, *args: Any, **options: Any) -> Any:
        with torch.autocast(device, dtype):
            return kind.forward(layer, *args, **options)

    return type(kind.__name__, (kind,), {"forward": forward})


def read_weights(backbone: Backbone) -> dict[str, Tensor]:
    """The model's trained tensors, copied to the CPU."""
    return kept_on_cpu(dict(backbone.model.named_parameters()))


def kept_on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy on the CPU, in one piece: hundreds of them, task after task, would scatter the memory."""
    flat = torch.cat([t.detach().reshape(-1) for t in tensors.values()]).cpu()
    return dict(zip(tensors, cut_like(flat, list(tensors.values())), strict=True))


@torch.no_grad()
def write_weights(backbone: Backbone, weights: Mapping[str, Tensor]) -> None:
    """Put weights into the model."""
    for name, parameter in backbone.model.named_parameters():
        parameter.copy_(weights[name])


@dataclass
class Examples:
    """Labelled texts of one task, ready to be read by a backbone."""

    backbone: Backbone
    answers: AnswerSet
    head: Head | None
    """Trainable, on an encoder."""
    tokens: Sequence[Tokens]
    labels: Sequence[int]
    prompt: Tensor | None = None
    """[rows, d] vectors that are read with every text; trainable where a method trains them."""
    lengths: list[int] = field(init=False)
    """Positions of each."""

    def __post_init__(self) -> None:
        paths = [self.answers.sequences[label][:-1] for label in self.labels]
        slots = range(0 if self.prompt is None else len(self.prompt))
        self.rows = [Row(t, slots, (path,)) for t, path in zip(self.tokens, paths, strict=True)]
        self.reading = self.backbone.prepare(self.rows)
        tail = 1 if self.backbone.answer_follows_text else 0
        self.lengths = [
            len(t.ids) + len(slots) + tail * len(path)
            for t, path in zip(self.tokens, paths, strict=True)
        ]
        longest = self.answers.longest
        gold = [self.answers.sequences[label] for label in self.labels]
        padded = [[*tokens, *[IGNORE] * (longest - len(tokens))] for tokens in gold]
        self.targets = torch.tensor(padded, device=self.backbone.device)

    def __len__(self) -> int:
        return len(self.labels)

    def hidden(self, batch: Sequence[int]) -> Tensor:
        """Read-outs [n, t, h]."""
        index = torch.tensor(list(batch), device=self.backbone.device)
        width = max(self.lengths[i] for i in batch)
        return self.backbone.hidden(self.reading.at(index, width), self.bank())

    def loss(self, batch: Sequence[int], hidden: Tensor | None = None) -> Tensor:
        """Mean cross-entropy of some of them (Eq. 1); `hidden` where they have been read, beside others."""
        index = torch.tensor(list(batch), device=self.backbone.device)
        hidden = self.hidden(batch) if hidden is None else hidden[:, : self.targets.shape[1]]
        targets = self.targets[index][:, : hidden.shape[1]]
        return cross_entropy(self.backbone.logits(hidden, self.head), targets)

    def log_probs(self) -> Tensor:
        """Label log-probabilities [n, labels] of all of them."""
        heads = stack_heads([self.head.detached()]) if self.head else None
        return self._quiz.log_probs(self.bank().detach(), heads)

    @cached_property
    def _quiz(self) -> Quiz:
        """Made once: validation asks again and again."""
        slots = range(len(self.bank()))
        return Quiz(self.backbone, self.tokens, [0] * len(self), [slots], [self.answers])

    def bank(self) -> Tensor:
        """[rows, d] prompt vectors that are read with the texts; mostly none."""
        if self.prompt is not None:
            return self.prompt
        size = (0, self.backbone.embed_dim)
        return torch.zeros(size, dtype=self.backbone.lane_dtype, device=self.backbone.device)


def make_examples(
    backbone: Backbone,
    task: Task | TaskCard,
    rows: Rows,
    head: Head | None,
    prompt: Tensor | None = None,
) -> Examples:
    """Rows of a task as examples for that backbone."""
    words = [(task.label_words or {})[name] for name in task.label_names]
    answers = backbone.answers(words)
    tokens = backbone.tokenize(rows.texts, 0 if prompt is None else len(prompt), answers.longest)
    return Examples(backbone, answers, head, tokens, rows.labels, prompt)


def make_head(backbone: Backbone, classes: int, generator: torch.Generator) -> Head | None:
    """A new trainable head, where the backbone needs one."""
    if not backbone.needs_head:
        return None
    bound = backbone.hidden_dim**-0.5
    weight = torch.empty(classes, backbone.hidden_dim, dtype=backbone.lane_dtype)
    weight.uniform_(-bound, bound, generator=generator)
    bias = torch.zeros(classes, dtype=backbone.lane_dtype)
    return Head(*(t.to(backbone.device).requires_grad_() for t in (weight, bias)))


class Learnable(Protocol):
    """What `fit_weights` learns: so many examples, and the loss of some of them."""

    @property
    def backbone(self) -> Backbone:
        """What reads them."""

    def __len__(self) -> int: ...

    def loss(self, batch: Sequence[int]) -> Tensor:
        """Of these examples."""


class Hooks:
    """What a method may do beside the plain loss; this one does nothing."""

    def penalty(self, batch: Sequence[int]) -> Tensor | None:
        """Added to the loss of every step; `batch` says which training examples it is about."""
        return None

    def edit_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Called between the backward pass and the optimiser's step."""

    def after_step(self, step: int, optimiser: torch.optim.Optimizer) -> None:
        """Called after the optimiser's step."""


def fit_weights(
    train: Learnable,
    validation: Examples,
    metric: str,
    settings: TrainSettings,
    order: torch.Generator,
    hooks: Hooks,
    groups: Groups,
    report: Report | None = None,
    names: tuple[str, str] = ("", ""),
) -> dict[str, float]:
    """Train these tensors on the examples; leave them in their best state by validation.

    Args:
        train: What is learnt.
        validation: What the best state is chosen by; the last is kept where there is none.
        metric: Of the task.
        settings: Epochs, batch size, clipping.
        order: Of the training examples.
        hooks: What the method does beside.
        groups: What is trained, with learning rates.
        report: Called after every epoch.
        names: Lane and task, for the report.

    Raises:
        TrainingError: When a loss is not finite.
    """
    optimiser = torch.optim.AdamW(
        [{"params": list(tensors), "lr": rate} for tensors, rate in groups if tensors],
        weight_decay=settings.weight_decay,
        fused=True,  # one pass over the weights instead of many
    )
    trained = [tensor for tensors, _ in groups for tensor in tensors]
    _settle_compiling(train, settings.batch_size)
    best, kept, best_epoch, latest, step = (-math.inf, -math.inf), None, 0, None, 0
    epochs = settings.epochs_of(len(train))
    for epoch in range(1, epochs + 1):
        taken: list[Tensor] = []
        places = torch.randperm(len(train), generator=order).tolist()
        for first in range(0, len(places), settings.batch_size):
            batch = places[first : first + settings.batch_size]
            with taking_steps(train.backbone):
                loss = train.loss(batch)
                extra = hooks.penalty(batch)
                optimiser.zero_grad()
                (loss if extra is None else loss + extra).backward()  # type: ignore[no-untyped-call]
                hooks.edit_gradients(trained)
                if settings.clip > 0:
                    torch.nn.utils.clip_grad_norm_(trained, settings.clip)
                optimiser.step()
                step += 1
                taken.append(loss.detach())
                hooks.after_step(step, optimiser)
        losses = torch.stack(taken).tolist()  # once an epoch: reading a number waits for the device
        for k, value in enumerate(losses):
            if not math.isfinite(value):
                raise TrainingError(
                    f"the loss became {value} in task {names[1]!r}, epoch {epoch}, step "
                    f"{step - len(losses) + k + 1}. Lower the learning rate, or use dtype fp32."
                )
        due = epoch % settings.validate_every == 0 or epoch == epochs
        if due and len(validation):
            found = validation.log_probs()
            gold = torch.tensor(list(validation.labels), device=found.device)
            guess = found.argmax(dim=-1).tolist()
            latest = score_predictions(metric, validation.labels, guess)
            likelihood = float(found.gather(1, gold[:, None]).mean())
            if (latest, likelihood) > best:
                best, best_epoch = (latest, likelihood), epoch
                kept = [tensor.detach().clone() for tensor in trained]
        if report:
            mean = sum(losses) / len(losses)
            top = best[0] if kept else None
            report(Progress(names[0], names[1], epoch, epochs, mean, latest, top))
    if kept:
        with torch.no_grad():
            for tensor, value in zip(trained, kept, strict=True):
                tensor.copy_(value)
    facts = {"epochs": float(epochs), "best_epoch": float(best_epoch or epochs)}
    if kept:
        facts |= {"validation_score": best[0], "validation_log_likelihood": best[1]}
    return facts


def _settle_compiling(train: Learnable, batch_size: int) -> None:
    """Compile the layers of a trainable copy where that is wanted, by a pass that changes nothing; or go on without."""
    backbone = train.backbone
    if backbone.is_frozen or backbone.is_compiled or backbone.compile not in COMPILED:
        return
    backbone.is_compiled = True
    try:
        with backbone.training_layers():
            loss = train.loss(range(min(batch_size, len(train))))
            torch.autograd.grad(loss, list(backbone.model.parameters()), allow_unused=True)
    except torch.OutOfMemoryError:
        raise  # without compiling it would need more
    except Exception as error:
        said = in_a_line(error)
        backbone.is_compiled, backbone.compile = False, "auto"
        warnings.warn(f"{backbone.name!r} is trained without compiling ({said}).", stacklevel=2)
