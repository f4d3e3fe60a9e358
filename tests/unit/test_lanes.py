"""The engine: packed equals alone, selection, early stop, the guard."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from qtuning.config import make_settings
from qtuning.errors import TrainingError
from qtuning.lanes import Progress, fit_lanes, run_requests
from qtuning.methods import make_method
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
    return [tensor for group in lane.parameters().values() for tensor in group]


def train_steps(backbone, lanes, steps: int) -> None:
    """The engine's own step, a fixed number of times."""
    from qtuning.lanes import _begin, _step

    settings = make_settings(**{**SMALL, "batch_size": 4})[1]
    fits = [_begin(lane, settings) for lane in lanes]
    for _ in range(steps):
        _step(backbone, [(fit, fit.next_batch()) for fit in fits])


@pytest.mark.parametrize(
    "extra", [{}, {"mlp": True, "mlp_hidden": 8}, {"retention": "jsd"}], ids=str
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


def test_packed_equals_alone_in_float32_for_one_step(family_backbone) -> None:
    lanes = make_lanes(family_backbone)
    batches = [list(range(4)) for _ in lanes]

    def losses_and_gradients(groups):
        found = []
        for group in groups:
            asked = [(lane, lane.requests(batch)) for lane, batch in group]
            losses = run_requests(family_backbone, [r for _, requests in asked for r in requests])
            torch.stack(losses).sum().backward()
            first = 0
            for lane, requests in asked:
                loss = sum(float(x.detach()) for x in losses[first : first + len(requests)])
                first += len(requests)
                grads = [t.grad.clone() if t.grad is not None else None for t in leaves(lane)]
                found.append((loss, grads))
                for tensor in leaves(lane):
                    tensor.grad = None
        return found

    pairs = list(zip(lanes, batches, strict=True))
    together = losses_and_gradients([pairs])
    alone = losses_and_gradients([[pair] for pair in pairs])
    for (loss_a, grads_a), (loss_b, grads_b) in zip(together, alone, strict=True):
        assert loss_a == pytest.approx(loss_b, abs=1e-4)
        for a, b in zip(grads_a, grads_b, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert (a - b).abs().max() <= 1e-4 * max(1.0, float(b.abs().max()))


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
    from qtuning.scoring import Query, score

    answerer = lane.answerer()
    found = score(bert, [Query(answerer, t) for t in lane.validation])
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
    with torch.no_grad():
        lanes[1].prompt.fill_(math.nan)
    with pytest.raises(
        TrainingError, match=r"nan in task 'task1', epoch 1, step 1, lane 'task1, seed 1'"
    ):
        fit_lanes(bert, lanes, make_settings(**SMALL)[1])


def test_numbers_that_break_after_the_last_step_are_not_kept(bert, monkeypatch) -> None:
    lane = one_lane(bert)
    original = lane.answerer

    def broken():
        with torch.no_grad():
            lane.prompt.fill_(math.nan)
        return original()

    monkeypatch.setattr(lane, "answerer", broken)
    with pytest.raises(
        TrainingError, match="validation likelihood became nan in task 'task1', epoch 1"
    ):
        fit_lanes(bert, [lane], make_settings(**SMALL)[1])


def test_gradients_are_clipped_per_lane(bert) -> None:
    """A lane with a huge gradient does not shrink its neighbour's step."""
    calm, again = (make_lanes(bert)[0] for _ in range(2))
    wild = make_lanes(bert)[2]
    with torch.no_grad():
        wild.head.weight.mul_(1e4)
    train_steps(bert, [calm, wild], 1)
    train_steps(bert, [again], 1)
    assert (calm.prompt - again.prompt).abs().max() < 1e-5


def test_runs_are_repeatable() -> None:
    def run() -> list[torch.Tensor]:
        backbone = make_backbone("bert")
        lanes = make_lanes(backbone)
        fit_lanes(backbone, lanes, make_settings(**SMALL)[1])
        return [t.detach().clone() for lane in lanes for t in leaves(lane)]

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)
