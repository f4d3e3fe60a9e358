"""What defines each rival, against independent references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qtuning.config import make_settings
from qtuning.evaluation import backward_transfer
from qtuning.methods import make_method
from qtuning.methods.ewc import ewc_penalty, fisher_diagonal
from qtuning.methods.multitask import JointHooks
from qtuning.methods.replaying import ReplayHooks, choose_memory, project
from qtuning.pack import Pack
from qtuning.seeding import numpy_generator
from qtuning.snapshots import predict_log_probs
from qtuning.stream_loop import run_stream
from qtuning.tasks import Rows
from tests.conftest import SMALL, make_backbone, make_task


def method_for(backbone, name: str, **settings):
    return make_method(name, backbone, *make_settings(**{**SMALL, **settings}))


# ── EWC ──────────────────────────────────────────────────────────────────────────────────────


def test_fisher_of_a_logistic_regression_in_closed_form() -> None:
    """The gradient of one example is (p - y) x^T, so F is the mean of its squares."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (7,), generator=generator)
    weight = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    (found,) = fisher_diagonal(
        lambda i: F.cross_entropy(x[i : i + 1] @ weight.T, y[i : i + 1]), 7, [weight]
    )
    scores = np.exp(x.numpy() @ weight.detach().numpy().T)
    off = scores / scores.sum(axis=1, keepdims=True) - np.eye(3)[y.numpy()]
    expected = np.mean((off[:, :, None] * x.numpy()[:, None, :]) ** 2, axis=0)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


def test_ewc_penalty_by_hand() -> None:
    now, then, fisher = ({"w": torch.tensor(v)} for v in ([1.0, 2.0], [0.0, 4.0], [3.0, 0.5]))
    assert float(ewc_penalty(now, then, fisher, 10.0)) == pytest.approx(5 * (3 * 1 + 0.5 * 4))


def test_ewc_without_strength_is_continual_finetuning(bert) -> None:
    tasks = [make_task(f"task{i}", rows=8, seed=i) for i in range(2)]
    found = []
    for name, extra in (
        ("ewc", {"ewc_strength": 0.0}),
        ("continual-finetune", {}),
        ("ewc", {"ewc_strength": 1e5}),
    ):
        method = method_for(bert, name, weights_lr=1e-3, epochs=2, **extra)
        state = method.start(0)
        for task in tasks:
            state = method.learn(state, task, task.split(4))
        found.append(state.weights)
    for name, weight in found[0].items():
        torch.testing.assert_close(weight, found[1][name], rtol=0, atol=1e-6)
    moved = [sum(float((s[n] - found[1][n]).abs().sum()) for n in s) for s in (found[0], found[2])]
    assert moved[1] > 10 * moved[0]  # a strong penalty does hold the weights


# ── A-GEM ────────────────────────────────────────────────────────────────────────────────────


def test_a_projected_gradient_never_opposes_the_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    opposed = 0
    for _ in range(200):
        g, r = (
            [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((3, 2), (4,))]
            for _ in "ab"
        )
        flat_g, flat_r = (torch.cat([t.flatten() for t in each]) for each in (g, r))
        found = torch.cat([t.flatten() for t in project(g, r)])
        dot = flat_g @ flat_r
        opposed += bool(dot < 0)
        assert found @ flat_r >= -1e-12
        expected = flat_g if dot >= 0 else flat_g - dot / (flat_r @ flat_r) * flat_r
        torch.testing.assert_close(found, expected)
    assert 50 < opposed < 150  # both cases were seen


# ── replay ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("share", "each"), [(0.01, 1), (0.1, 2), (0.5, 10), (1.0, 20)])
def test_a_memory_holds_its_share_of_every_class(share: float, each: int) -> None:
    rows = Rows(tuple(f"text {i}" for i in range(60)), [i % 3 for i in range(60)])
    places = choose_memory(rows, 3, share, numpy_generator("memory"))
    assert sorted(rows.labels[i] for i in places) == sorted([0, 1, 2] * each)
    assert len(set(places)) == len(places)


def test_replay_comes_every_few_steps_with_a_batch_of_each_task() -> None:
    weight = torch.zeros(1, requires_grad=True)
    seen: list[tuple[str, int]] = []

    class Memory(list):
        def loss(self, places):
            seen.append((self[0], len(places)))
            return (weight - 1).square().sum()

    hooks = ReplayHooks([Memory("aaa"), Memory("bbbbb")], 3, 4, torch.Generator().manual_seed(0))
    optimiser = torch.optim.SGD([weight], 0.1)
    for step in range(1, 11):
        hooks.after_step(step, optimiser)
    assert seen == [("a", 3), ("b", 4)] * 3
    assert hooks.replayed == 6
    assert float(weight) > 0.5


def test_multi_task_training_sees_every_task_in_every_step() -> None:
    weight = torch.zeros(1, requires_grad=True)
    seen: list[tuple[str, tuple[int, ...]]] = []

    class Other(list):
        def loss(self, places):
            seen.append((self[0], tuple(places)))
            return (weight - len(self)).square().sum()

    hooks = JointHooks([Other("aaa"), Other("bbbbb")], 2, torch.Generator().manual_seed(0))
    for _ in range(6):
        assert float(hooks.penalty().detach()) == 9 + 25  # the sum of both losses
    assert [name for name, _ in seen] == ["a", "b"] * 6
    drawn = [i for name, places in seen if name == "a" for i in places]
    assert sorted(drawn[:3]) == sorted(drawn[3:6]) == [0, 1, 2]  # a short task begins again


def test_a_memory_survives_saving(bert, tmp_path) -> None:
    from qtuning import QTuner

    tuner = QTuner(bert, method="replay", **SMALL)
    tuner.learn(make_task("first", rows=10), progress=False)
    tuner.save_pretrained(tmp_path / "c")
    loaded = QTuner.from_pretrained(tmp_path / "c", model=bert)
    assert loaded.state.memory == tuner.state.memory
    assert len(loaded.state.memory["first"]["texts"]) == 2


# ── forgetting, by measurement ───────────────────────────────────────────────────────────────


def test_one_model_that_moves_on_forgets_and_a_model_per_task_does_not() -> None:
    """Opposite label words for the same texts: what helps one task hurts the other."""
    backbone = make_backbone("gpt2")
    tasks = [make_task("first", ("negative", "positive"), rows=20),
             make_task("second", ("positive", "negative"), rows=20)]  # fmt: skip
    transfer = {}
    for name in ("continual-finetune", "per-task-finetune"):
        flat = {**SMALL, "weights_lr": 1e-2, "epochs": 30, "shots": 12, "validate_every": 5}
        settings = make_settings(**flat)
        method = make_method(name, backbone, *settings)
        result = run_stream(method, backbone, tasks, settings[1])
        assert result.matrix[1, 0] > 0.7
        transfer[name] = backward_transfer(result.matrix)
        assert result.unchanged["first"] == (name == "per-task-finetune")
    assert transfer["per-task-finetune"] == 0.0
    assert transfer["continual-finetune"] < -0.3


# ── prompts ──────────────────────────────────────────────────────────────────────────────────


def first_loss(backbone, lane) -> float:
    pack = Pack(backbone, [lane], make_settings(**SMALL)[1])
    return float(pack.forward(*pack.plan([range(4)], [1])).detach())


def test_a_carried_prompt_goes_on_where_the_last_task_ended(bert) -> None:
    method, fresh = method_for(bert, "prompt-tuning"), method_for(bert, "per-task-prompt")
    tasks = [make_task(f"task{i}", rows=8, seed=i) for i in range(2)]
    states = [m.learn(m.start(0), tasks[0], tasks[0].split(4)) for m in (method, fresh)]
    assert torch.equal(states[0].queue.rows, states[1].queue.rows)  # the first task is the same
    lanes = [
        m.lane(s, tasks[1], tasks[1].split(4)) for m, s in zip((method, fresh), states, strict=True)
    ]
    assert torch.equal(lanes[0].trained["prompt"], states[0].queue.rows)
    assert first_loss(bert, lanes[0]) != pytest.approx(first_loss(bert, lanes[1]), abs=1e-6)
    after = method.learn(states[0], tasks[1], tasks[1].split(4))
    _, today = after.answers(bert, "task0")
    assert torch.equal(today.rows, after.queue.rows)  # the first task is answered by today's prompt


def test_a_shared_prompt_is_as_long_as_the_queue_and_retains_from_the_second_task(bert) -> None:
    method = method_for(bert, "shared-prompt", memory_factor=0.5)
    state = method.start(0)
    retains = []
    for i in range(3):
        task = make_task(f"task{i}", rows=8, seed=i)
        lane = method.lane(state, task, task.split(4))
        retains.append(lane.teacher is not None)
        state = method.learn(state, task, task.split(4))
    assert retains == [False, True, True]
    assert [len(s.rows) for s in state.snapshots.values()] == [8, 8, 8]  # 3 * 2 shared, 2 own


def test_zero_shot_learns_nothing(family_backbone) -> None:
    if family_backbone.needs_head:
        pytest.skip("an encoder has no label words")
    method = method_for(family_backbone, "zero-shot")
    task = make_task("task", rows=8)
    other = make_task("task", rows=8, seed=9)
    found = [
        predict_log_probs(
            family_backbone,
            method.learn(method.start(0), t, t.split(4)).snapshots["task"],
            ["good soup"],
        )
        for t in (task, other)
    ]
    assert torch.equal(found[0], found[1])
