"""Recorded passes of weights in training: the same numbers, and never one inside another.

Without a card a recording runs its function again; what must hold of the order of passes holds there too.
"""

from __future__ import annotations

import pytest
import torch

from qtuning.backbones.reading import Batch
from qtuning.config import make_settings
from qtuning.methods import make_method
from qtuning.recorded import RecordedPasses
from qtuning.weights import taking_steps, trainable_copy
from tests.conftest import SMALL, make_backbone, make_task


def recorded_for(worker) -> RecordedPasses:
    worker.recorded = RecordedPasses(list(worker.model.parameters()), worker.max_length)
    return worker.recorded


def batch_for(worker, rows: int = 2, width: int = 5) -> Batch:
    ids = torch.arange(rows * width).view(rows, width) % 20
    filled = torch.ones(rows, width, dtype=torch.bool)
    filled[0, -1] = False
    return Batch(worker.embed(ids), filled, filled, torch.zeros_like(ids), filled.sum(dim=1))


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, "continual-finetune") for kind in ("gpt2", "llama", "t5")]
    + [("bert", n) for n in ("a-gem", "ewc", "multi-task", "replay", "mbpa++", "idbr")],
)
def test_weights_are_trained_recorded_as_eager(kind: str, name: str) -> None:
    """float64, 1e-9; with several tasks, so that memories are read between two passes of a task."""
    tasks = [make_task(f"task{i}", rows=8, seed=i) for i in range(3)]
    found = []
    for is_recorded in (False, True):
        backbone = make_backbone(kind, dtype=torch.float64)
        method = make_method(
            name, backbone, *make_settings(**{**SMALL, "weights_lr": 1e-3, "epochs": 3, "replay_every": 1})
        )  # fmt: skip
        if is_recorded:
            recorded = recorded_for(method.worker)
        state = method.start(0)
        for task in tasks:
            state = method.learn(state, task, task.split(4))
        found.append(state.weights)
    replays = len(recorded._passes)
    assert (
        replays > 0 if kind != "t5" else replays == 0
    )  # which has two stacks, and goes on as it was
    assert not recorded.is_on
    for n, weight in found[0].items():
        if not n.endswith("key.bias"):  # whose gradient is 0 but for rounding
            torch.testing.assert_close(found[1][n], weight, rtol=0, atol=1e-6 if kind == "llama" else 1e-9)  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_prompt_is_trained_recorded_as_eager(kind: str, monkeypatch) -> None:
    """Of a frozen model: only what it reads takes a gradient."""
    tasks = [make_task(f"task{i}", rows=8, seed=i) for i in range(2)]
    written = ["good soup Answer: negative", "bad bread Answer: positive"] * 2
    found, recordings = [], []
    make = RecordedPasses.__init__

    def keep(self, *given) -> None:
        make(self, *given)
        recordings.append(self)

    monkeypatch.setattr(RecordedPasses, "__init__", keep)
    monkeypatch.setattr("qtuning.methods.rehearsing._reads_texts_once", lambda *_: False)
    for is_recorded in (False, True):
        monkeypatch.setattr("qtuning.weights.can_record", lambda device, is_on=is_recorded: is_on)
        backbone = make_backbone(kind, dtype=torch.float64)
        settings = make_settings(**{**SMALL, "prompt_lr": 0.1, "epochs": 3, "pseudo_share": 0.3})
        method = make_method("lfpt5", backbone, *settings)
        monkeypatch.setattr(method, "_write", lambda names, *_: written[: len(names)])
        state = method.start(0)
        for task in tasks:
            state = method.learn(state, task, task.split(4))
        assert state.snapshots["task1"].facts["pseudo_samples"] == 4
        assert method.view.recorded is None
        found.append(state.prompt)
    assert len(recordings) == len(tasks)
    assert all(each._passes for each in recordings)
    torch.testing.assert_close(*found, rtol=0, atol=1e-6 if kind == "llama" else 1e-9)


def test_passes_of_a_shape_share_a_recording() -> None:
    """The first runs as it is, forward and back, the next is recorded; lengths up to a multiple are one shape."""
    worker = trainable_copy(make_backbone("gpt2", dtype=torch.float64))
    recorded, read = recorded_for(worker), []
    true = type(worker).text_states
    worker.text_states = lambda batch: read.append(batch.is_filled.shape) or true(worker, batch)
    with taking_steps(worker):
        worker.states(batch_for(worker))
        assert not recorded._seen  # it has not gone back yet
        for width in (5, 7, 30):
            states = worker.states(batch_for(worker, 2, width))
            assert states.shape[1] == width
            assert len(recorded._passes) == (width > 5)
            states.sum().backward()
    assert set(read) == {(2, 32)}
    assert len(recorded._passes) == 1


def test_a_pass_waits_for_the_one_before() -> None:
    """Recordings share memory: before its backward pass is taken, or given up, the next one runs as it is."""
    worker = trainable_copy(make_backbone("gpt2", dtype=torch.float64))
    recorded = recorded_for(worker)
    batch = batch_for(worker)
    assert not recorded.takes(batch)  # not in training
    with taking_steps(worker):
        worker.states(batch_for(worker)).sum().backward()
        states = worker.states(batch)
        assert recorded._passes
        assert not recorded.takes(batch)
        states.sum().backward()
        assert recorded.takes(batch_for(worker))
        with pytest.raises(RuntimeError, match="once only"):
            torch.autograd.grad(states.sum(), [*worker.model.parameters()], allow_unused=True)
        states = worker.states(batch_for(worker))
        assert not recorded.takes(batch)
        del states
        assert recorded.takes(batch)
        with torch.no_grad():
            assert not recorded.takes(batch)


def test_what_cannot_be_recorded_is_read_as_it_is(monkeypatch) -> None:
    worker = trainable_copy(make_backbone("bert", dtype=torch.float64))
    recorded = recorded_for(worker)

    def fail(*args):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("qtuning.recorded.record", fail)
    expected = worker.states(batch_for(worker))
    with taking_steps(worker):
        worker.states(batch_for(worker)).sum().backward()
        with pytest.warns(UserWarning, match="without CUDA graphs .*not permitted"):
            found = worker.states(batch_for(worker))
        assert not recorded.takes(batch_for(worker))
    torch.testing.assert_close(found, expected)
