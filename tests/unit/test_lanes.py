"""The engine: packed equals alone, selection, early stop, the guard."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from qtuning.config import make_settings
from qtuning.errors import TrainingError
from qtuning.fit import Fit
from qtuning.lanes import TIMED_STEPS, Progress, _Engine, compiling_pays, fit_lanes
from qtuning.methods import make_method
from qtuning.pack import Pack
from qtuning.stack import GROUPS, LaneStack
from tests.conftest import SMALL, make_backbone, make_task

LABELS = [
    ("negative", "positive"),
    ("world", "sport", "business"),
    ("report problem", "how to", "status", "no"),
]


def make_lanes(backbone, method: str = "q-tuning", **settings):
    """Six lanes: other seeds, queue lengths, class counts and tasks."""
    lanes = []
    for i in range(6):
        flat = {**SMALL, "memory_factor": 0.5, "epochs": 100, "batch_size": 4 + i % 2, **settings}
        parts = make_settings(**flat)
        learner = make_method(method, backbone, *parts)
        state = learner.start(seed=i)
        for earlier in range(i):  # queue lengths 0 … 3 prompts, the last lanes evicting
            fake = torch.randn(2, backbone.embed_dim, dtype=backbone.lane_dtype,
                               generator=torch.Generator().manual_seed(10 * i + earlier))  # fmt: skip
            queue = state.queue.with_room(torch.Generator().manual_seed(0)).append(fake)
            layout = torch.cat([state.shared_prefix, queue.rows])
            state = replace(state, queue=queue, learnt=state.learnt + 1, last_layout=layout)
        task = make_task(f"task{i}", LABELS[i % 3], rows=8, seed=i)
        lanes.append(learner.lane(state, task, task.split(4, seed=i)))
    return lanes


def leaves(lane) -> list[torch.Tensor]:
    return [tensor for tensor in lane.trained.values() if tensor.numel()]


def train_steps(backbone, lanes, steps: int) -> list[list[float]]:
    """The engine's own step, a fixed number of times; the losses of each lane."""
    settings = make_settings(**{**SMALL, "batch_size": 4})[1]
    fits = [Fit(lane, settings) for lane in lanes]
    pack = Pack(backbone, lanes, settings)
    for _ in range(steps):
        pack.step([fit.next_batch() for fit in fits], [fit.step for fit in fits])
    for i, lane in enumerate(lanes):
        for name, tensor in lane.trained.items():
            tensor.copy_(pack.export(i)[f"parameter.{name}"])
    return pack.take_losses().T.tolist()


@pytest.mark.parametrize(
    "extra",
    [{}, {"mlp": True, "mlp_hidden": 8}, {"retention": "jsd"}, {"thaw": True, "old_scale": 0.5}],
    ids=str,
)
def test_packed_equals_alone_in_float64(exact_backbone, extra: dict) -> None:
    packed, alone = make_lanes(exact_backbone, **extra), make_lanes(exact_backbone, **extra)
    assert sum(lane.teacher is not None for lane in packed) >= 2  # retention travels in the pack
    train_steps(exact_backbone, packed, 20)
    for lane in alone:
        train_steps(exact_backbone, [lane], 20)
    fresh = make_lanes(exact_backbone, **extra)
    for together, single, start in zip(packed, alone, fresh, strict=True):
        for a, b in zip(leaves(together), leaves(single), strict=True):
            assert (a - b).abs().max() < 1e-9
        assert any(
            (a - c).abs().max() > 1e-3 for a, c in zip(leaves(together), leaves(start), strict=True)
        )


def test_captured_steps_have_one_shape_and_no_row_is_cut_off(bert, monkeypatch) -> None:
    monkeypatch.setattr("qtuning.passes.CPU_PASS", 1)  # every bit of padding is worth a pass
    lanes = make_lanes(bert)
    assert any(lane.teacher is not None for lane in lanes)
    pack = Pack(bert, lanes, make_settings(**{**SMALL, "batch_size": 4})[1])
    bert.is_captured = True
    draw = np.random.default_rng(0)
    ahead = [
        [draw.permutation(len(lane.train))[:4].tolist() for _ in range(10 * (1 + i))]
        for i, lane in enumerate(lanes)
    ]  # the first ends first
    pack.expect(ahead)
    expected = pack.passes
    assert len(expected) > 1
    longest = [sorted(range(len(n.train)), key=lambda i: -len(n.train[i].ids))[:4] for n in lanes]
    for batches in (*itertools.zip_longest(*ahead, fillvalue=[]), longest):
        step, passes = pack.plan(batches, [1] * 6)
        lengths, first = pack.lengths[step.rows.numpy()], 0
        for rows, width in passes:
            assert lengths[first : first + rows].max() <= width
            first += rows
        assert first == len(lengths)
        assert passes == expected or batches is longest  # nobody expected that
    assert len(passes) == 1


def test_the_batches_ahead_are_those_that_come(bert) -> None:
    settings = make_settings(**{**SMALL, "epochs": 3, "batch_size": 3})[1]
    fit = Fit(one_lane(bert), settings)
    ahead = list(fit.batches_ahead())
    assert len(ahead) == 3 * -(-len(fit.lane.train) // 3)
    for i, expected in enumerate(ahead):
        assert list(fit.batches_ahead()) == ahead[i:]
        assert fit.next_batch() == expected
        fit.epoch += not fit.pending
    assert list(fit.batches_ahead()) == []


def test_lanes_that_are_done_may_stand_still_and_change_nothing(
    exact_backbone, monkeypatch
) -> None:
    """As on a card, where a new pack for the last few steps would cost more than it saves."""
    settings = [make_settings(**{**SMALL, "epochs": 1 + i % 3})[1] for i in range(6)]
    monkeypatch.setattr(Pack, "has_fixed_shapes", True)
    monkeypatch.setattr("qtuning.lanes.CHECKPOINT_SHARE", float("inf"))  # after every epoch
    found, packs, original = [], [], Pack.__init__
    for steps in (0.0, 1e9):
        built: list = []
        with monkeypatch.context() as patch:
            patch.setattr("qtuning.lanes.STEPS_OF_A_NEW_PACK", steps)
            patch.setattr(Pack, "__init__", lambda *a, b=built: (b.append(1), original(*a))[1])
            lanes, states = make_lanes(exact_backbone), []
            facts = fit_lanes(exact_backbone, lanes, settings, checkpoint=states.append)
        packs.append(len(built))
        found.append((facts, [lane.trained for lane in lanes], states))
    assert packs[0] > packs[1] == 1
    (facts, new, states), (other_facts, still, other_states) = found
    assert len(states) == len(other_states)
    for a, b in zip(facts, other_facts, strict=True):
        assert a == pytest.approx(b, abs=1e-9)
    for a, b in zip(new, still, strict=True):
        for name, tensor in a.items():
            torch.testing.assert_close(tensor, b[name], rtol=0, atol=1e-9)
    for (_, a), (_, b) in zip(states[-1], other_states[-1], strict=True):
        assert {k: a[k] for k in ("epoch", "step", "is_done")} == {
            k: b[k] for k in ("epoch", "step", "is_done")
        }


def test_several_passes_give_what_one_gives(exact_backbone, monkeypatch) -> None:
    exact_backbone.may_read_lines = False  # a line is one pass
    lanes = make_lanes(exact_backbone)
    monkeypatch.setattr("qtuning.passes.CPU_PASS", 10**6)
    assert len(cut_of(exact_backbone, lanes)) == 1
    one = losses_and_gradients(exact_backbone, lanes)
    monkeypatch.setattr("qtuning.passes.CPU_PASS", 1)
    assert len(cut_of(exact_backbone, lanes)) > 1
    several = losses_and_gradients(exact_backbone, lanes)
    for (loss_a, grads_a), (loss_b, grads_b) in zip(one, several, strict=True):
        assert loss_a == pytest.approx(loss_b, abs=1e-12)
        for name, gradient in grads_a.items():
            torch.testing.assert_close(gradient, grads_b[name], rtol=0, atol=1e-12)


def test_large_tasks_have_fewer_epochs(bert) -> None:
    settings = make_settings(**{**SMALL, "epochs": 10, "batch_size": 4, "most_steps": 9})[1]
    assert [settings.epochs_of(rows) for rows in (1, 4, 5, 8, 12, 16, 400)] == [9, 9, 4, 4, 3, 2, 1]
    assert make_settings(epochs=10)[1].epochs_of(400) == 10
    lane, seen = one_lane(bert), []
    assert len(lane.train) == 12
    facts = fit_lanes(bert, [lane], settings, seen.append)[0]
    assert facts["epochs"] == 3
    assert [(now.epoch, now.epochs) for now in seen] == [(i, 3) for i in range(1, 4)]


def test_packs_go_at_once_when_nobody_needs_them(bert, monkeypatch) -> None:
    """Their captured steps hold gigabytes of a card, and the garbage collector does not know."""
    seen: list = []

    class Watched(Pack):
        has_fixed_shapes = True

        def __init__(self, *given) -> None:
            assert all(pack() is None for pack in seen)
            super().__init__(*given)
            seen.append(weakref.ref(self))

    monkeypatch.setattr("qtuning.lanes.Pack", Watched)
    monkeypatch.setattr("qtuning.lanes.STEPS_OF_A_NEW_PACK", 0.0)
    settings = [make_settings(**{**SMALL, "epochs": 1 + i % 3})[1] for i in range(6)]
    gc.disable()
    try:
        fit_lanes(bert, make_lanes(bert), settings)
        assert len(seen) > 2  # a new pack whenever a lane ends
        assert all(pack() is None for pack in seen)
    finally:
        gc.enable()


@pytest.mark.parametrize(("seconds", "expected"), [(-1.0, "every"), (1e9, "common")])
def test_lanes_that_end_at_different_times_are_kept_every_few_seconds(
    bert, monkeypatch, seconds: float, expected: str
) -> None:
    monkeypatch.setattr("qtuning.lanes.CHECKPOINT_SECONDS", seconds)
    monkeypatch.setattr("qtuning.lanes.CHECKPOINT_SHARE", float("inf"))
    settings = make_settings(**{**SMALL, "epochs": 2, "batch_size": 4})[1]
    ends, kept = [], []
    lanes = make_lanes(bert)[:2]  # two and three batches an epoch
    fit_lanes(bert, lanes, settings, ends.append, checkpoint=lambda states: kept.append(len(ends)))
    assert kept == ([1, 2, 3, 4] if expected == "every" else [4])


@pytest.mark.parametrize(
    ("lanes", "expected"), [(2, [1, 21, 41]), (1, list(range(1, 43)))], ids=["pack", "alone"]
)
def test_checkpoints_take_a_share_of_a_packs_time(
    bert, monkeypatch, lanes: int, expected: list[int]
) -> None:
    """A clock that moves by a second an epoch and by one a checkpoint; a lane alone may be stopped after any epoch."""
    clock, kept = [0.0], []
    monkeypatch.setattr("qtuning.lanes.time.monotonic", lambda: clock[0])

    def ended(progress) -> None:
        clock[0] += 1.0 / lanes

    def keep(states) -> None:
        kept.append(states[0][1]["epoch"])
        clock[0] += 1.0

    settings = make_settings(**{**SMALL, "epochs": 42, "batch_size": 64, "validate_every": 50})[1]
    fit_lanes(bert, [one_lane(bert) for _ in range(lanes)], settings, ended, checkpoint=keep)
    assert kept == expected


def cut_of(backbone, lanes) -> tuple:
    """The passes of a step of the first four examples of every lane."""
    pack = Pack(backbone, lanes, make_settings(**{**SMALL, "batch_size": 4})[1])
    return pack.plan([range(4) for _ in lanes], [1 for _ in lanes])[1]


def test_the_average_is_that_of_all_states_and_then_forgets_the_oldest(exact_backbone) -> None:
    settings = make_settings(**{**SMALL, "batch_size": 4, "average": 0.75})[1]
    lane = one_lane(exact_backbone)
    pack = Pack(exact_backbone, [lane], settings)
    seen, expected = [], None
    for count in range(1, 11):
        pack.step([range(4)], [count])
        seen.append(pack.stacks[0].trained["prompt"].detach().clone())
        expected = sum(seen) / count if count <= 4 else 0.75 * expected + 0.25 * seen[-1]
        assert (pack.stacks[0].averaged["prompt"] - expected).abs().max() < 1e-12
    pack.keep_best([0])
    assert (pack.export(0)["best.prompt"] - expected[0]).abs().max() < 1e-12
    assert (pack.export(0)["parameter.prompt"] - seen[-1][0]).abs().max() == 0


def test_the_average_is_what_is_kept_and_goes_on_after_a_stop(exact_backbone) -> None:
    settings = make_settings(**{**SMALL, "epochs": 3, "average": 0.9})[1]
    states: list = []
    whole, plain = one_lane(exact_backbone), one_lane(exact_backbone)
    fit_lanes(exact_backbone, [whole], settings, checkpoint=states.append)
    again = one_lane(exact_backbone)
    fit_lanes(exact_backbone, [again], settings, resume=states[0])
    fit_lanes(exact_backbone, [plain], make_settings(**{**SMALL, "epochs": 3})[1])
    assert all(torch.equal(a, b) for a, b in zip(leaves(whole), leaves(again), strict=True))
    assert any(
        (a - b).abs().max() > 1e-4 for a, b in zip(leaves(whole), leaves(plain), strict=True)
    )


def losses_and_gradients(backbone, lanes) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """For each lane of a pack its loss on its first four examples, and the gradients."""
    pack = Pack(backbone, lanes, make_settings(**{**SMALL, "batch_size": 4})[1])
    losses = pack.forward(*pack.plan([range(4) for _ in lanes], [1 for _ in lanes]))
    losses.sum().backward()
    found = []
    for i, lane in enumerate(lanes):
        s, k = pack.places[i]
        grads = {name: pack.stacks[s].trained[name].grad[k] for name in lane.trained}
        own = {n: g[tuple(map(slice, lane.trained[n].shape))] for n, g in grads.items()}
        found.append((float(losses[i].detach()), own))
    return found


def test_packed_equals_alone_in_float32_for_one_step(family_backbone) -> None:
    lanes = make_lanes(family_backbone)
    together = losses_and_gradients(family_backbone, lanes)
    alone = [losses_and_gradients(family_backbone, [lane])[0] for lane in lanes]
    for (loss_a, grads_a), (loss_b, grads_b) in zip(together, alone, strict=True):
        assert loss_a == pytest.approx(loss_b, abs=1e-4)
        for name, a in grads_a.items():
            if not a.numel():
                continue
            assert (a - grads_b[name]).abs().max() <= 1e-4 * max(
                1.0, float(grads_b[name].abs().max())
            )


def test_the_update_is_that_of_torch_with_clipping_and_weight_decay(bert) -> None:
    """Three steps with fixed gradients against torch.optim.Adam; a discriminator is not clipped."""
    lanes = make_lanes(bert, retention="jsd")[4:]
    settings = make_settings(**{**SMALL, "clip": 0.5, "weight_decay": 0.1})[1]
    stack = Pack(bert, lanes, settings).stacks[0]
    own = {k: t.detach()[0].clone().requires_grad_() for k, t in stack.trained.items()}
    groups = [
        {"params": [t], "lr": getattr(settings, GROUPS[k.split(".")[0]])} for k, t in own.items()
    ]
    adam = torch.optim.Adam(groups, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in (1, 2, 3):
        given = {k: torch.randn(t.shape, generator=generator) for k, t in stack.trained.items()}
        for name, tensor in own.items():
            tensor.grad = given[name][0].clone()
        torch.nn.utils.clip_grad_norm_([t for k, t in own.items() if "discr" not in k], 0.5)
        adam.step()
        with torch.no_grad():
            for old, new in stack.moved(given, torch.tensor([step] * len(stack.lanes))):
                old.copy_(new)
        for name, tensor in own.items():
            torch.testing.assert_close(stack.trained[name][0], tensor, rtol=1e-5, atol=1e-7)


def test_a_lane_that_stops_first_leaves_the_others_as_they_would_be_alone(exact_backbone) -> None:
    settings = make_settings(**{**SMALL, "epochs": 4})[1]
    packed, alone = make_lanes(exact_backbone), make_lanes(exact_backbone)
    fit_lanes(exact_backbone, packed, settings)  # lanes have 2, 3 or 4 batches an epoch
    for lane in alone:
        fit_lanes(exact_backbone, [lane], settings)
    for together, single in zip(packed, alone, strict=True):
        for a, b in zip(leaves(together), leaves(single), strict=True):
            assert (a - b).abs().max() < 1e-9


def one_lane(backbone, **settings):
    return make_lanes(backbone, **settings)[1]


def test_the_best_state_by_validation_is_kept(bert) -> None:
    lane = one_lane(bert)
    seen: list[Progress] = []
    facts = fit_lanes(bert, [lane], make_settings(**{**SMALL, "epochs": 12})[1], seen.append)[0]
    scores = [p.validation for p in seen]
    assert facts["validation_score"] == max(scores)
    assert scores[int(facts["best_epoch"]) - 1] == max(scores)
    from qtuning.evaluation import score_predictions
    from qtuning.scoring import AnswererTable

    table = AnswererTable([lane.finish({}).snapshots[lane.task].answerer(bert)])
    found = table.log_probs(bert, lane.validation, [0] * len(lane.validation))
    again = score_predictions("accuracy", lane.validation_labels, [int(f.argmax()) for f in found])
    assert again == max(scores)
    assert [p.epoch for p in seen] == list(range(1, 13))


def test_patience_stops_early_and_is_off_by_default(bert) -> None:
    flat = {
        **SMALL,
        "epochs": 40,
        "prompt_lr": 0.0,
        "head_lr": 0.0,
        "scale_lr": 0.0,
        "shared_lr": 0.0,
    }
    stopped = fit_lanes(bert, [one_lane(bert)], make_settings(**flat, patience=3)[1])[0]
    assert stopped["epochs"] == 4  # the first is best; three more without gain
    assert fit_lanes(bert, [one_lane(bert)], make_settings(**flat)[1])[0]["epochs"] == 40


def test_validation_every_n_epochs(bert) -> None:
    seen: list[Progress] = []
    settings = make_settings(**{**SMALL, "epochs": 5, "validate_every": 2})[1]
    fit_lanes(bert, [one_lane(bert)], settings, seen.append)
    assert [p.validation is None for p in seen][:1] == [True]
    assert seen[-1].validation is not None


def test_a_non_finite_loss_names_task_epoch_step_and_lane(bert) -> None:
    lanes = make_lanes(bert)[:3]
    lanes[1].trained["prompt"].fill_(math.nan)
    with pytest.raises(
        TrainingError, match=r"nan in task 'task1', epoch 1, step 1, lane 'task1, seed 1'"
    ):
        fit_lanes(bert, lanes, make_settings(**SMALL)[1])


def test_numbers_that_break_after_the_last_step_are_not_kept(bert, monkeypatch) -> None:
    original = Pack.validate

    def broken(pack, due):
        with torch.no_grad():
            pack.stacks[0].trained["prompt"].fill_(math.nan)
        return original(pack, due)

    monkeypatch.setattr(Pack, "validate", broken)
    with pytest.raises(
        TrainingError, match="validation likelihood became nan in task 'task1', epoch 1"
    ):
        fit_lanes(bert, [one_lane(bert)], make_settings(**SMALL)[1])


def test_gradients_are_clipped_per_lane(bert) -> None:
    """A lane with a huge gradient does not shrink its neighbour's step."""
    calm, again = (make_lanes(bert)[0] for _ in range(2))
    wild = make_lanes(bert)[2]
    wild.trained["head.weight"].mul_(1e4)
    train_steps(bert, [calm, wild], 1)
    train_steps(bert, [again], 1)
    assert (calm.trained["prompt"] - again.trained["prompt"]).abs().max() < 1e-5


def test_runs_are_repeatable() -> None:
    def run() -> list[torch.Tensor]:
        backbone = make_backbone("bert")
        lanes = make_lanes(backbone)
        fit_lanes(backbone, lanes, make_settings(**SMALL)[1])
        return [t.detach().clone() for lane in lanes for t in leaves(lane)]

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_lanes_that_wait_for_a_place_end_as_they_would_alone(exact_backbone, at_once: int) -> None:
    """Six lanes of 2 to 4 steps an epoch: places are given on at different times."""
    settings = make_settings(**{**SMALL, "epochs": 3})[1]
    packed, alone = make_lanes(exact_backbone), make_lanes(exact_backbone)
    exact_backbone.at_once = at_once
    facts = fit_lanes(exact_backbone, packed, settings)
    for lane, single, found in zip(packed, alone, facts, strict=True):
        expected = fit_lanes(exact_backbone, [single], settings)[0]
        assert found == pytest.approx(expected, abs=1e-9)
        for a, b in zip(leaves(lane), leaves(single), strict=True):
            assert (a - b).abs().max() < 1e-9


def test_out_of_memory_goes_on_with_fewer_lanes_and_loses_nothing(
    exact_backbone, monkeypatch
) -> None:
    settings = make_settings(**{**SMALL, "epochs": 3})[1]
    packed, alone = make_lanes(exact_backbone), make_lanes(exact_backbone)
    original, sizes = Pack.compute, []

    def small_card(pack, inputs, widths):
        if len(pack.lanes) > 2 and len(sizes) > 3:  # memory runs short in the middle of an epoch
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(len(pack.lanes))
        return original(pack, inputs, widths)

    monkeypatch.setattr(Pack, "compute", small_card)
    with pytest.warns(UserWarning, match="ran out of memory: going on with 2 lanes at once"):
        facts = fit_lanes(exact_backbone, packed, settings)
    assert sizes[:4] == [6] * 4
    assert max(sizes[4:]) == 2
    for lane, single, found in zip(packed, alone, facts, strict=True):
        assert found == pytest.approx(fit_lanes(exact_backbone, [single], settings)[0], abs=1e-9)
        for a, b in zip(leaves(lane), leaves(single), strict=True):
            assert (a - b).abs().max() < 1e-9


def test_one_lane_that_does_not_fit_says_what_to_lower(bert, monkeypatch) -> None:
    def tiny_card(pack, inputs, widths):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Pack, "compute", tiny_card)
    with pytest.raises(
        TrainingError, match=r"too little memory for a single lane.*Lower batch_size"
    ):
        fit_lanes(bert, [one_lane(bert)], make_settings(**SMALL)[1])


def test_a_model_that_cannot_be_compiled_goes_on_without(exact_backbone, monkeypatch) -> None:
    settings = make_settings(**{**SMALL, "epochs": 2})[1]
    packed, plain = make_lanes(exact_backbone), make_lanes(exact_backbone)
    expected = fit_lanes(exact_backbone, plain, settings)
    original = Pack.compute

    def refuse(pack, inputs, widths):
        if pack.backbone.is_compiled:
            raise RuntimeError("no compiler found\nand a long trace")
        return original(pack, inputs, widths)

    monkeypatch.setattr(Pack, "compute", refuse)
    exact_backbone.compile = "on"
    with pytest.warns(
        UserWarning, match=r"cannot be compiled here \(RuntimeError: no compiler found\)"
    ):
        found = fit_lanes(exact_backbone, packed, settings)
    assert found == expected
    assert not exact_backbone.is_compiled


def test_an_error_that_has_nothing_to_do_with_compiling_is_not_hidden(bert, monkeypatch) -> None:
    monkeypatch.setattr(Pack, "compute", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit_lanes(bert, [one_lane(bert)], make_settings(**SMALL)[1])


@pytest.mark.parametrize(
    ("mode", "tasks", "expected"),
    [("auto", 1, False), ("auto", 5, True), ("on", 5, False), ("dynamic", 1, True)],
)
def test_streams_compile_once_for_all_lengths(bert, mode: str, tasks: int, expected: bool) -> None:
    bert.compile = mode
    settings = make_settings(**SMALL)[1]
    _Engine(bert, [one_lane(bert)], settings, None, tasks_ahead=tasks)
    assert bert.for_all_lengths == expected
    _Engine(bert, [one_lane(bert)], settings, None, tasks_ahead=1)  # the last task of the stream
    assert bert.for_all_lengths == expected


def test_compiling_is_for_long_work_on_a_card(bert) -> None:
    assert compiling_pays(steps_ahead=10_000, step_seconds=0.1)
    assert not compiling_pays(steps_ahead=100, step_seconds=0.1)
    fit_lanes(bert, [one_lane(bert)], make_settings(**SMALL)[1])
    assert not bert.is_compiled  # nor captured: this is a CPU
    assert not bert.is_captured


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on", "dynamic"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5", "bart"])
def test_compiled_equals_eager(kind: str, mode: str) -> None:
    """float64, five steps: 1e-9, Llama 1e-6 (its norm rounds to float32); the model ends as it was."""
    backbone = make_backbone(kind, dtype=torch.float64)
    eager, compiled = make_lanes(backbone), make_lanes(backbone)
    train_steps(backbone, eager, 5)
    backbone.is_compiled, backbone.for_all_lengths = True, mode == "dynamic"
    train_steps(backbone, compiled, 5)
    for a, b in zip(eager, compiled, strict=True):
        for x, y in zip(leaves(a), leaves(b), strict=True):
            assert (x - y).abs().max() < (1e-6 if kind == "llama" else 1e-9)
    assert all(layer._compiled_call_impl is None for layer in backbone.model.modules())


def test_memory_that_ends_while_tensors_are_moved_changes_nothing(
    exact_backbone, monkeypatch
) -> None:
    """The last stack's update fails once; the lanes of the first must not have taken the step twice."""
    settings = make_settings(**{**SMALL, "epochs": 2})[1]
    packed, alone = make_lanes(exact_backbone), make_lanes(exact_backbone)
    original, calls = LaneStack.moved, []

    def fails_once(stack, gradients, count):
        calls.append(len(stack.lanes))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(stack, gradients, count)

    monkeypatch.setattr(LaneStack, "moved", fails_once)
    with pytest.warns(UserWarning, match="going on with 3 lanes"):
        fit_lanes(exact_backbone, packed, settings)
    for lane, single in zip(packed, alone, strict=True):
        fit_lanes(exact_backbone, [single], settings)
        for a, b in zip(leaves(lane), leaves(single), strict=True):
            assert (a - b).abs().max() < 1e-9


def test_a_batch_is_not_filled_up_where_shapes_may_change(bert) -> None:
    lane = one_lane(bert)
    pack = Pack(bert, [lane], make_settings(**{**SMALL, "batch_size": 64})[1])
    batch = pack.plan([range(3)], [1])[0].batches[0]
    assert batch.example.shape == (1, 3)
    bert.is_captured = True
    batch = pack.plan([range(3)], [1])[0].batches[0]
    assert batch.example.shape == (1, len(lane.train))
    assert batch.is_live.sum() == 3


def test_steps_are_timed_until_the_decision_and_no_longer(bert, monkeypatch) -> None:
    """As on a card, with a clock that stands still for all but the counting."""
    monkeypatch.setattr("qtuning.lanes._Engine._now", lambda engine: 0.0)
    engine = _Engine(bert, [one_lane(bert)], make_settings(**SMALL)[1], None, tasks_ahead=1)
    bert.is_captured = True
    for _ in range(TIMED_STEPS + 3):
        engine.step()
    assert len(engine._times) == TIMED_STEPS
    assert not bert.is_compiled  # steps that cost nothing cannot repay it
