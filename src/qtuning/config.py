"""Settings of a run, in two parts: what the method is, and how it is trained.

The engine sees only `TrainSettings`; a method sees only its `MethodSettings`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from qtuning.errors import ConfigError, unknown
from qtuning.eviction import EVICTIONS

RETENTIONS = ("kl", "jsd", "none")
SHARED_SCHEDULES = ("all", "algorithm1")
WARM_STARTS = ("none", "loss", "answers", "key", "latest", "first")


@dataclass(frozen=True, slots=True)
class MethodSettings:
    """The shape of Q-tuning. Each ablation of the paper is one of these switches."""

    prompt_length: int = 10
    """Soft prompt vectors per task, `l` (paper: 10)."""
    shared_length: int = 10
    """Vectors of the shared prefix; 0 leaves it out."""
    queue_size: int = 10
    """Prompts the queue holds at most, the current one included (paper: 5 or 10)."""
    eviction: str = "pca"
    """Rule that makes room in a full queue: pca, fifo, random, or none (the queue grows)."""
    keep_mean: bool = False
    """Add back the mean that DQ-PCA subtracts (the paper drops it)."""
    scale: bool = True
    """Learn the rank-one scale; off, every row counts as it is."""
    scale_new_prompt: bool = True
    """Let the scale reweigh the current prompt too, as the paper does."""
    newest_first: bool = False
    """Put newer prompts before older ones (the order of ProgPrompt's code)."""
    old_scale: float = 1.0
    """What the scale of the queue's rows starts from (paper: 1)."""
    fill_queue: bool = False
    """Begin with a queue full of vocabulary rows, so that the first tasks have as many rows as the last."""
    thaw: bool = False
    """Train a copy of the queue's rows for the task, which its snapshot keeps; the queue stays as it is."""
    keep_prompts: bool = True
    """Put finished prompts into the queue; off, it stays as it began: rows that no task was learnt into."""
    warm_start: str = "none"
    """Where the new prompt starts: none (vocabulary), or an earlier task: by loss, answers, key; latest; first."""
    mlp: bool = False
    """Train prompts through a residual MLP, baked at the end of the task."""
    mlp_hidden: int = 512
    """Hidden units of that MLP (paper: 512)."""
    retention: str = "kl"
    """Loss that keeps the shared prefix close to the previous state: kl, jsd or none."""
    memory_factor: float = 0.01
    """Weight of the retention loss (paper: 0.01 for long sequences)."""
    replay_share: float = 0.01
    """Of a task's training examples, those that methods with a memory keep; one per class at least."""
    replay_every: int = 10
    """Steps between two replays of what is kept."""
    ewc_strength: float = 1e9
    """Weight of EWC's penalty, lambda. Where the training loss is near 0 squared gradients are tiny, so it is large."""
    neighbours: int = 32
    """Stored examples that MBPA++ adapts to before it answers a text."""
    local_steps: int = 30
    """Gradient steps of that adaptation."""
    local_lr: float = 1e-3
    """Its learning rate."""
    local_penalty: float = 1e-3
    """Its pull back to the weights it began with."""
    idbr_strength: float = 0.5
    """Weight of IDBR's penalty on moving features."""
    lm_weight: float = 0.25
    """Weight of LFPT5's loss on writing examples."""
    pseudo_share: float = 0.01
    """Weight of LFPT5's rehearsal of earlier tasks, the rest going to the task."""
    pseudo_samples: int = 2
    """Examples that LFPT5 writes for each class of each earlier task."""
    shared_schedule: str = "all"
    """Tasks that train the shared prefix: all, or algorithm1 (the first, then from eviction on)."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "prompt_length", "queue_size", "mlp_hidden", "replay_every")
        _at_least(self, 1, "neighbours", "pseudo_samples")
        _at_least(self, 0, "shared_length", "old_scale", "memory_factor", "replay_share")
        _at_least(self, 0, "local_steps", "local_lr", "local_penalty", "idbr_strength", "lm_weight")
        _at_least(self, 0, "pseudo_share", "ewc_strength")
        _at_most(self, 0.99, "pseudo_share")
        _at_most(self, 4096, "prompt_length", "shared_length")
        _at_most(self, 100_000, "queue_size", "mlp_hidden")
        _one_of(self, "eviction", tuple(EVICTIONS))
        _one_of(self, "retention", RETENTIONS)
        _one_of(self, "shared_schedule", SHARED_SCHEDULES)
        _one_of(self, "warm_start", WARM_STARTS)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How one task is trained and its best state chosen."""

    epochs: int = 15
    """Passes over the training examples of a task."""
    most_steps: int = 0
    """Steps of a task at most, in whole epochs and at least one: large tasks have fewer of them; 0 sets no limit."""
    batch_size: int = 16
    """Examples per step and lane (paper: 8)."""
    prompt_lr: float = 1e-2
    """Learning rate of the new prompt (Adam)."""
    scale_lr: float = 5e-3
    """Learning rate of the scale's two vectors, which start at 1."""
    shared_lr: float = 1e-2
    """Learning rate of the shared prefix."""
    queue_lr: float = 1e-2
    """Learning rate of a task's own copy of the queue's rows, with `thaw`."""
    mlp_lr: float = 1e-3
    """Learning rate of the residual MLPs."""
    head_lr: float = 1e-2
    """Learning rate of an encoder's classification head."""
    weights_lr: float = 3e-5
    """Learning rate of the model's own weights, for the methods that train them (AdamW)."""
    discriminator_lr: float = 1e-3
    """Learning rate of the discriminator of `retention: jsd`."""
    weight_decay: float = 0.0
    """L2 penalty of Adam, on every group alike."""
    clip: float = 1.0
    """Largest gradient norm of one lane; 0 switches clipping off."""
    average: float = 0.0
    """Of lanes, keep a running average instead of the latest state: what is left of it after a step, e.g. 0.98."""
    validate_every: int = 1
    """Epochs between two looks at the validation rows."""
    patience: int = 0
    """Validations without a better score before a lane stops; 0 never stops early."""
    shots: int = 16
    """Training examples per class; 0 takes all there are."""
    validation_limit: int = 500
    """Validation examples per class at most."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "epochs", "batch_size", "validate_every")
        _at_least(self, 0, "patience", "clip", "weight_decay", "shots", "validation_limit")
        _at_least(self, 0, "average", "most_steps")
        _at_most(self, 0.9999, "average")
        _at_most(self, 1_000_000, "epochs", "batch_size", "shots")
        rates = [f.name for f in fields(self) if f.name.endswith("_lr")]
        _at_least(self, 0, *rates)
        _at_most(self, 1000, *rates)

    def epochs_of(self, examples: int) -> int:
        """Passes over so many training examples."""
        if not self.most_steps:
            return self.epochs
        return min(self.epochs, max(1, self.most_steps // self.steps_per_epoch(examples)))

    def steps_per_epoch(self, examples: int) -> int:
        """Batches of so many training examples."""
        return math.ceil(examples / self.batch_size)


FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "encoder": {},
    "causal": {"batch_size": 8},
    "seq2seq": {
        "prompt_lr": 0.3,
        "shared_lr": 0.3,
        "queue_lr": 0.3,
        "scale_lr": 1e-2,
        "batch_size": 8,
    },
}
"""Learning rates follow the size of a family's embeddings. Encoder and causal: chosen on rows held out from the
starter tasks' training and validation parts; seq2seq: the paper's."""


def make_settings(family: str = "encoder", **flat: Any) -> tuple[MethodSettings, TrainSettings]:
    """Both parts from flat keywords; unknown names are refused with the nearest known one.

    What is not given comes from the defaults of the backbone's family.
    """
    parts: list[Any] = []
    flat = {**FAMILY_DEFAULTS[family], **flat}
    known = [f.name for cls in (MethodSettings, TrainSettings) for f in fields(cls)]
    for name in flat:
        if name not in known:
            raise ConfigError(unknown("setting", name, known))
    for cls in (MethodSettings, TrainSettings):
        typed = {
            f.name: _typed(f.name, flat[f.name], f.type) for f in fields(cls) if f.name in flat
        }
        parts.append(cls(**typed))
    return parts[0], parts[1]


def settings_dict(method: MethodSettings, train: TrainSettings) -> dict[str, Any]:
    """The flat form, as `make_settings` takes it and as manifests record it."""
    return {**asdict(method), **asdict(train)}


WISHES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}


def _typed(name: str, value: Any, kind: Any) -> Any:
    """`value` as the declared type; text from a command line is read as that type."""
    wanted = {"int": int, "float": float, "bool": bool, "str": str}[str(kind)]
    if isinstance(value, str) and wanted is not str:
        flags = {"true": True, "false": False}
        try:
            return flags[value.lower()] if wanted is bool else wanted(value)
        except (ValueError, KeyError):
            raise ConfigError(f"{name} must be {WISHES[str(kind)]}, got {value!r}.") from None
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ConfigError(f"{name} must be {WISHES[str(kind)]}, got {value!r}.")
    return value


def _at_least(settings: Any, low: float, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not value >= low or math.isinf(value):  # written so that nan fails too
            raise ConfigError(f"{name} must be at least {low} and finite, got {value}.")


def _at_most(settings: Any, high: float, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value > high:
            raise ConfigError(f"{name} must be at most {high:,}, got {value:,}. Lower {name}.")


def _one_of(settings: Any, name: str, options: tuple[str, ...]) -> None:
    value = getattr(settings, name)
    if value not in options:
        raise ConfigError(unknown(name, str(value), options))
