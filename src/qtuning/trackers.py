"""Curves for TensorBoard or trackio, when asked; our own records are written in any case."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from qtuning.errors import ConfigError, unknown
from qtuning.lanes import Progress

TRACKERS = ("tensorboard", "trackio")


class Tracker(Protocol):
    """What a run tells a tracker."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Some numbers at a step."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


def make_tracker(name: str, folder: Path, config: dict[str, Any]) -> Tracker:
    """A tracker by name, writing below the folder."""
    if name not in TRACKERS:
        raise ConfigError(unknown("tracker", name, TRACKERS))
    try:
        return _TensorBoard(folder) if name == "tensorboard" else _Trackio(config)
    except ImportError:
        raise ConfigError(f"--log-with {name} needs its package: pip install {name}.") from None


def epoch_values(now: Progress) -> dict[str, float]:
    """The numbers of one lane after an epoch, under its name."""
    values = {f"{now.lane}/loss": now.loss}
    if now.validation is not None:
        values[f"{now.lane}/validation"] = now.validation
    return values


class _TensorBoard:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, config: dict[str, Any]):
        import trackio

        self._trackio = trackio
        trackio.init(project="qtuning", config=config)

    def log(self, values: dict[str, float], step: int) -> None:
        self._trackio.log({**values, "epoch": step})

    def close(self) -> None:
        self._trackio.finish()
