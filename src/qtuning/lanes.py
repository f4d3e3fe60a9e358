"""fit_lanes: any number of prompt-tuning runs through one frozen backbone, in the same passes.

A lane is one run learning one task. The engine stacks lanes (`stack.py`) into a pack (`pack.py`), takes
steps with all of them at once, validates them together, and keeps each lane's best state. A single
run is a pack of one lane.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from qtuning.backbones import Backbone
from qtuning.config import TrainSettings
from qtuning.errors import TrainingError, in_a_line
from qtuning.evaluation import score_predictions
from qtuning.fit import Fit, FitState
from qtuning.pack import Pack, for_each
from qtuning.stack import Lane


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


Report = Callable[[Progress], None]
Checkpoint = Callable[[list[FitState]], None]

TIMED_STEPS = 10
"""Steps whose fastest is taken for a replay; the first of every shape are slower."""
COMPILE_SECONDS = 60.0
"""What compiling a model for a few shapes costs, on the slow side."""
SHARE_SAVED = 0.3
"""Of a captured step, what compiling is expected to save."""
SHARE_OF_FREE_MEMORY = 0.4
"""For one step of a pack: a captured step keeps its memory while another shape is run for the first time."""

STEPS_OF_A_NEW_PACK = 16.0
"""On a card, steps that could be taken while a pack is built anew and its steps are captured."""

CHECKPOINT_SECONDS = 5.0
"""Between two checkpoints of lanes that end their epochs at different times."""
CHECKPOINT_SHARE = 0.05
"""Of a pack's time, what checkpoints may take."""


def fit_lanes(
    backbone: Backbone,
    lanes: Sequence[Lane],
    settings: TrainSettings | Sequence[TrainSettings],
    report: Report | None = None,
    checkpoint: Checkpoint | None = None,
    resume: Sequence[FitState] | None = None,
    tasks_ahead: int = 1,
) -> list[dict[str, float]]:
    """Train every lane on its task and leave it in its best state by validation.

    Args:
        backbone: The frozen model.
        lanes: What is trained.
        settings: How: all of them, or each.
        report: Called for each lane after each of its epochs.
        checkpoint: Called with all that continuing needs: after every epoch of a single lane; of several when all end
            an epoch, or every few seconds where they do not, and less often where the call takes long.
        resume: What an earlier `checkpoint` was given; training goes on from there, bit for bit.
        tasks_ahead: How many tasks like this one will follow, it included; decides whether compiling pays.

    Lanes beyond `backbone.at_once` wait, and one begins whenever another ends.

    Returns:
        For each lane its best epoch, validation score and last training loss.

    Raises:
        TrainingError: When a loss is not finite; names task, epoch, step and lane.
    """
    engine = _Engine(backbone, lanes, settings, resume, tasks_ahead)
    while engine.running:
        ended = engine.step()
        if not ended:
            continue
        is_common = len(ended) == len(engine.moving)
        engine.validate([fit for fit in ended if _is_due(fit)])
        for fit in ended:
            if report:
                report(_progress(fit))
            fit.losses.clear()
            stopped = 0 < fit.settings.patience <= fit.stale
            fit.is_done = stopped or fit.epoch >= fit.epochs
        if checkpoint and engine.is_checkpoint_due(is_common):
            engine.keep(checkpoint)
        engine.replace_finished()
    return [_finish(fit) for fit in engine.fits]


class _Engine:
    """The lanes that train now, as a pack, and those that wait for a place in it."""

    pack: Pack

    def __init__(
        self,
        backbone: Backbone,
        lanes: Sequence[Lane],
        settings: TrainSettings | Sequence[TrainSettings],
        resume: Sequence[FitState] | None,
        tasks_ahead: int,
    ):
        self.backbone, self.tasks_ahead = backbone, tasks_ahead
        each = for_each(settings, len(lanes))
        self.fits = [Fit(lane, own) for lane, own in zip(lanes, each, strict=True)]
        for fit, saved in zip(self.fits, resume or (), strict=bool(resume)):
            fit.restore(saved)
        planned = self.fits[0].at_once if self.fits else 0  # the plan of a resumed pack is kept
        self.at_once = planned or backbone.at_once or lanes_that_fit(backbone, lanes, each)
        self.running: list[Fit] = []
        self._kept_at, self._cost = time.monotonic(), 0.0
        self._times: list[float] = []
        if backbone.compile != "off":
            backbone.is_captured = backbone.device.type == "cuda"
            backbone.is_compiled = backbone.is_compiled or backbone.compile in ("on", "dynamic")
            is_stream = backbone.compile == "auto" and tasks_ahead > 1
            backbone.for_all_lengths |= backbone.compile == "dynamic" or is_stream
        self._pack([])

    def _pack(self, kept: Sequence[Fit]) -> None:
        """These lanes, and waiting ones in the free places; those that had begun before go first."""
        waiting = [fit for fit in self.fits if not fit.is_done and fit not in kept]
        waiting.sort(key=lambda fit: not fit.has_begun)
        self.running = [*kept, *waiting[: self.at_once - len(kept)]]
        if not self.running:
            return
        if hasattr(self, "pack"):
            del self.pack  # its memory on the card is wanted for the next
        self.pack = Pack(
            self.backbone,
            [fit.lane for fit in self.running],
            [fit.settings for fit in self.running],
        )
        for i, fit in enumerate(self.running):
            fit.has_begun = True
            if fit.saved:
                self.pack.restore(i, fit.saved)
                fit.saved = None
        if self.pack.has_fixed_shapes:
            self.pack.expect([fit.batches_ahead() for fit in self.running])

    @property
    def moving(self) -> list[Fit]:
        """Running lanes that are not done."""
        return [fit for fit in self.running if not fit.is_done]

    def _unpack(self) -> None:
        """Every running lane's numbers to where they are kept outside a pack."""
        for i, fit in enumerate(self.running):
            fit.saved = self.pack.export(i)

    def step(self) -> list[Fit]:
        """One step of every moving lane; those that ended an epoch."""
        batches = [[] if fit.is_done else fit.next_batch() for fit in self.running]
        while (failure := self._try(batches)) is not None:
            is_memory = failure.startswith("OutOfMemoryError")
            if is_memory and len(self.moving) > 1:
                batches = self._with_fewer_lanes(batches)
            elif self._is_fast:
                self._slower(failure)
            else:
                raise TrainingError(
                    f"the card has too little memory for a single lane with {self.pack.batch_size} "
                    f"examples a step. Lower batch_size, queue_size or max_length, or use dtype bf16."
                )
        ended = [fit for fit in self.moving if not fit.pending]
        if ended:
            self._collect_losses()
        for fit in ended:
            fit.epoch += 1
        return ended

    def _try(self, batches: list[list[int]]) -> str | None:
        """One step; or why it failed, in a line, so that nothing of it stays in memory."""
        try:
            is_timed = self._is_deciding
            began = self._now() if is_timed else 0.0
            self.pack.step(batches, [fit.step for fit in self.running])
            if is_timed:
                self._times.append(self._now() - began)
                self._compile_if_it_pays()
        except Exception as error:
            if not self._is_fast and not isinstance(error, torch.OutOfMemoryError):
                raise
            return in_a_line(error)
        return None

    @property
    def _is_fast(self) -> bool:
        """Whether there is a slower way to take the same steps."""
        backbone = self.backbone
        return backbone.is_compiled or backbone.is_captured or backbone.reads_lines

    @property
    def _is_deciding(self) -> bool:
        backbone = self.backbone
        is_open = backbone.compile == "auto" and backbone.is_captured and not backbone.is_compiled
        return is_open and len(self._times) < TIMED_STEPS

    def _now(self) -> float:
        torch.cuda.synchronize(self.backbone.device)
        return time.perf_counter()

    def _compile_if_it_pays(self) -> None:
        """After a few timed steps, once: if the steps ahead would repay it."""
        if len(self._times) < TIMED_STEPS:
            return
        ahead = max(fit.steps_ahead for fit in self.running) * self.tasks_ahead
        if compiling_pays(ahead, min(self._times)):
            self.backbone.is_compiled = True
            self.pack.graphs.forget()

    def _slower(self, failure: str) -> None:
        """Go on without what failed. The step changed nothing: tensors are moved last."""
        backbone = self.backbone
        if backbone.is_compiled:
            what, backbone.is_compiled, backbone.compile = "be compiled", False, "off"
        elif backbone.is_captured:
            what, backbone.is_captured, backbone.compile = "be captured as a CUDA graph", False, "off"  # fmt: skip
        else:  # last: lines were tried before they were used
            what, backbone.may_read_lines = "read rows without padding", False
            self.pack.quizzes.clear()
        self.pack.expect([fit.batches_ahead() for fit in self.running])
        self.pack.graphs.forget()
        warnings.warn(
            f"{backbone.name!r} cannot {what} here ({failure}): going on without.", stacklevel=2
        )

    def _with_fewer_lanes(self, batches: list[list[int]]) -> list[list[int]]:
        """Half of the lanes, with their batches; the rest takes its batch back and waits. Nothing was changed."""
        if self.pack.losses:
            self._collect_losses()
        self._unpack()
        moving = self.moving
        batches = [batch for batch in batches if batch]
        half = (len(moving) + 1) // 2
        for fit, batch in zip(moving[half:], batches[half:], strict=True):
            fit.pending = [*batch, *fit.pending]
            fit.step -= 1
        kept, self.at_once = moving[:half], half
        del self.pack
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        warnings.warn(
            f"the card ran out of memory: going on with {half} lanes at once.", stacklevel=2
        )
        self._pack(kept)
        return batches[:half]

    def _collect_losses(self) -> None:
        found = self.pack.take_losses()
        for fit, losses in zip(self.running, found.T, strict=True):
            if fit.is_done:
                continue
            fit.losses += losses.tolist()
            for k, value in enumerate(fit.losses):
                if not math.isfinite(value):
                    raise TrainingError(
                        f"the loss became {value} in task {fit.lane.task!r}, epoch {fit.epoch + 1}, step "
                        f"{fit.step - len(fit.losses) + k + 1}, lane {fit.lane.name!r}. Lower the learning "
                        f"rates, or use dtype fp32."
                    )

    def validate(self, due: Sequence[Fit]) -> None:
        """Score these lanes' validation rows together; keep the state of each that is better."""
        places = [self.running.index(fit) for fit in due if fit.lane.validation_labels]
        if not places:
            return
        better = []
        for i, (guess, likelihood) in zip(places, self.pack.validate(places), strict=True):
            fit = self.running[i]
            if not math.isfinite(likelihood):
                raise TrainingError(
                    f"the validation likelihood became {likelihood} in task {fit.lane.task!r}, epoch "
                    f"{fit.epoch}, lane {fit.lane.name!r}. Lower the learning rates, or use dtype fp32."
                )
            quality = score_predictions(fit.lane.metric, fit.lane.validation_labels, guess)
            if fit.judge((quality, likelihood)):
                better.append(i)
        self.pack.keep_best(better)

    def is_checkpoint_due(self, is_common: bool) -> bool:
        """After every epoch of a lane alone, which may be stopped there; of a pack, if the last one is a while ago."""
        if len(self.fits) == 1:
            return True
        wait = self._cost / CHECKPOINT_SHARE
        if not is_common:
            wait = max(wait, CHECKPOINT_SECONDS)
        return time.monotonic() - self._kept_at >= wait

    def keep(self, checkpoint: Checkpoint) -> None:
        """Hand every lane to the checkpoint, and see how long that takes."""
        began = time.monotonic()
        checkpoint(self.export())
        self._kept_at = time.monotonic()
        self._cost = self._kept_at - began

    def export(self) -> list[FitState]:
        """Every lane, for a checkpoint."""
        if self.pack.losses:
            self._collect_losses()
        self._unpack()
        for fit in self.fits:
            fit.at_once = self.at_once
        states = [fit.export() for fit in self.fits]
        for fit in self.running:
            fit.saved = None
        return states

    def replace_finished(self) -> None:
        """Give the places of lanes that are done to lanes that wait."""
        if len(self.moving) == len(self.running) or self._may_stand_still():
            return
        if self.pack.losses:
            self._collect_losses()
        self._unpack()
        self._pack(self.moving)

    def _may_stand_still(self) -> bool:
        """Whether lanes that are done cost less where they are than a new pack would: on a card, near the end."""
        is_wanted = any(not fit.is_done and fit not in self.running for fit in self.fits)
        if is_wanted or not self.moving or not self.pack.has_fixed_shapes:
            return False
        idle = 1 - len(self.moving) / len(self.running)
        return idle * max(fit.steps_ahead for fit in self.moving) < STEPS_OF_A_NEW_PACK


def compiling_pays(steps_ahead: int, step_seconds: float) -> bool:
    """Whether the steps ahead would save more than compiling costs."""
    return steps_ahead * step_seconds * SHARE_SAVED > COMPILE_SECONDS


def lanes_that_fit(
    backbone: Backbone, lanes: Sequence[Lane], settings: Sequence[TrainSettings]
) -> int:
    """As many lanes as the card has memory for, from one step of the longest of them; all on a CPU."""
    if backbone.device.type != "cuda" or len(lanes) < 2:
        return max(1, len(lanes))
    batch = max(own.batch_size for own in settings)
    longest = max(lanes, key=lambda lane: _positions(lane, batch, backbone.reads_lines))
    pack = Pack(backbone, [longest], replace(settings[0], batch_size=batch))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(backbone.device)
    before = torch.cuda.memory_allocated(backbone.device)
    size = min(batch, len(longest.train))
    order = sorted(range(len(longest.train)), key=lambda i: -len(longest.train[i].ids))
    losses = pack.forward(*pack.plan([order[:size]], [1]))
    torch.autograd.grad(losses.sum(), list(pack.stacks[0].trained.values()), allow_unused=True)
    needed = torch.cuda.max_memory_allocated(backbone.device) - before
    del losses, pack
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(backbone.device)[0]
    return max(1, min(len(lanes), int(SHARE_OF_FREE_MEMORY * free / needed)))


def _positions(lane: Lane, batch: int, in_line: bool) -> int:
    """Of a step with the lane's longest example, prompt included; retention reads it once more."""
    prompt = len(lane.layout({**lane.fixed, **lane.trained}))
    prompt += 0 if lane.teacher is None else lane.settings.shared_length
    text = max(len(tokens.ids) for tokens in lane.train) * (1 if lane.teacher is None else 2)
    return (prompt if in_line else batch * prompt) + batch * text


def _is_due(fit: Fit) -> bool:
    last = fit.epoch >= fit.epochs
    return last or fit.epoch % fit.settings.validate_every == 0


def _progress(fit: Fit) -> Progress:
    return Progress(
        lane=fit.lane.name,
        task=fit.lane.task,
        epoch=fit.epoch,
        epochs=fit.epochs,
        loss=sum(fit.losses) / len(fit.losses),
        validation=fit.latest,
        best=fit.best[0] if fit.best else None,
    )


def _finish(fit: Fit) -> dict[str, float]:
    """The lane in its best state by validation, or its last where there were no validation rows."""
    latest = "average" if fit.settings.average else "parameter"
    kind = "best" if fit.best else latest
    assert fit.saved is not None
    for name, tensor in fit.lane.trained.items():
        tensor.copy_(fit.saved[f"{kind}.{name}"])
    found = {"epochs": float(fit.epoch), "best_epoch": float(fit.best_epoch or fit.epoch)}
    if fit.best:
        found |= {"validation_score": fit.best[0], "validation_log_likelihood": fit.best[1]}
    return found
