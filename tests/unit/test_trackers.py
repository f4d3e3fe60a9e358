from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from qtuning.errors import ConfigError
from qtuning.lanes import Progress
from qtuning.trackers import epoch_values, make_tracker

NOW = Progress("spam, seed 0", "spam", 2, 5, 0.5, 0.75, 0.75)


def test_trackio_is_told_every_epoch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[object] = []
    fake = SimpleNamespace(
        init=lambda **options: told.append(options),
        log=told.append,
        finish=lambda: told.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    tracker = make_tracker("trackio", tmp_path, {"stream": "demo"})
    tracker.log(epoch_values(NOW), NOW.epoch)
    tracker.close()
    assert told == [
        {"project": "qtuning", "config": {"stream": "demo"}},
        {"spam, seed 0/loss": 0.5, "spam, seed 0/validation": 0.75, "epoch": 2},
        "finished",
    ]


def test_tensorboard_writes_below_the_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[object] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            told.append(Path(folder).name)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, value, step))

        def close(self) -> None:
            told.append("closed")

    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer)
    )
    tracker = make_tracker("tensorboard", tmp_path, {})
    tracker.log({"a": 1.0}, 3)
    tracker.close()
    assert told == ["tensorboard", ("a", 1.0, 3), "closed"]


def test_unknown_and_absent_trackers_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        make_tracker("tensorbord", tmp_path, {})
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="pip install trackio"):
        make_tracker("trackio", tmp_path, {})
