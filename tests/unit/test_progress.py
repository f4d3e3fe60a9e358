"""How far learning is: a bar on a terminal, lines in a log, nothing when quiet."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from qtuning import progress
from qtuning.lanes import Progress
from qtuning.progress import LearningBar


def epoch(number: int, lane: str = "spam, seed 1", validation: float | None = 0.5) -> Progress:
    return Progress(lane, lane.split(",")[0], number, 4, 0.25, validation, validation)


def follow(bar: LearningBar, *epochs: Progress) -> None:
    with bar:
        for each in epochs:
            bar(each)


def test_a_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Console(file=io.StringIO(), force_terminal=False)
    seconds = iter([0.0, 10.0, 60.0, 60.0, 70.0, 120.0, 120.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(seconds))
    bar = LearningBar(2, log)
    for each in (epoch(1), epoch(2), epoch(3, validation=None), epoch(4)):
        bar(each)
    monkeypatch.undo()
    assert capsys.readouterr().err.splitlines() == [
        # 2 of 8 epochs in a minute, then 4 of 8 in two
        "[1/2] spam, seed 1  epoch 2/4  loss 0.250  validation 50.0%  1 min, about 3 left",
        "[1/2] spam, seed 1  epoch 4/4  loss 0.250  validation 50.0%  2 min, about 2 left",
    ]


def test_quiet_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    follow(LearningBar(quiet=True), epoch(1), epoch(2))
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_and_no_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    shown = io.StringIO()
    follow(LearningBar(2, Console(file=shown, force_terminal=True, width=120)), epoch(1))
    assert "[1/2] spam, seed 1" in shown.getvalue()
    assert capsys.readouterr().err == ""


def test_a_new_beginning_counts_from_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    bar = LearningBar(2, Console(file=io.StringIO()))
    follow(bar, epoch(1), epoch(1, "spam, seed 2"))
    bar.begin(3)
    follow(bar, epoch(1, "tone, seed 1"))
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("[1/3] tone, seed 1  epoch 1/4")


def test_a_run_that_goes_on_counts_what_it_had_learnt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    seconds = iter([0.0, 0.0, 60.0, 60.0, 60.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(seconds))
    bar = LearningBar(console=Console(file=io.StringIO()))
    bar.begin(70, 68)
    bar(epoch(1))
    # an epoch took a minute, and seven are left of this task and the last
    assert capsys.readouterr().err.endswith("1 min, about 7 left\n")
    monkeypatch.undo()
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    bar.begin(3, 1)
    bar(epoch(1))
    assert capsys.readouterr().err.startswith("[2/3] spam, seed 1  epoch 1/4")


def test_a_task_that_goes_on_has_only_its_last_epochs_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    seconds = iter([0.0, 0.0, 60.0, 60.0, 60.0, 120.0, 120.0, 120.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(seconds))
    bar = LearningBar(console=Console(file=io.StringIO()))
    bar.begin(70, 69)
    bar(epoch(3))
    bar(epoch(4))
    one, two = capsys.readouterr().err.splitlines()
    assert one.endswith("1 min, about 1 left")
    assert two.endswith("2 min, about 0 left")


def test_a_run_that_learns_all_with_the_last_task_has_one_to_learn() -> None:
    tasks, bar = ("spam", "tone", "urgency"), LearningBar(quiet=True)
    runs = [
        SimpleNamespace(tasks=tasks, done=2, learns_last=learns_last)
        for learns_last in (True, False)
    ]
    bar.started(None, runs)
    assert (bar._tasks, bar._learnt) == (1 + 3, 0 + 2)
