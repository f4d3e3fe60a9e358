"""The method against an independent ProgPrompt, and what each of its switches does."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from qtuning.config import make_settings
from qtuning.fit import Fit
from qtuning.lanes import fit_lanes
from qtuning.methods import make_method
from qtuning.pack import Pack
from qtuning.seeding import torch_generator
from qtuning.tensors import part
from tests.conftest import SMALL, make_task

LABELS = ("negative", "positive", "neutral")


def method_for(backbone, name: str = "q-tuning", **settings):
    return make_method(name, backbone, *make_settings(**{**SMALL, **settings}))


class MinimalProgPrompt:
    """ProgPrompt written from its description alone: newest prompt first, all old ones frozen."""

    def __init__(self, backbone, settings) -> None:
        self.backbone, self.settings = backbone, settings
        self.old: list[torch.Tensor] = []

    def losses(self, task, split, prompt, head, order: list[list[int]]) -> list[float]:
        model, tokenizer = self.backbone.model, self.backbone.tokenizer
        prompt = prompt.clone().requires_grad_()
        groups = [{"params": [prompt], "lr": self.settings.prompt_lr}]
        if head is not None:
            head = [t.clone().requires_grad_() for t in head]
            groups.append({"params": head, "lr": self.settings.head_lr})
        trained = [t for g in groups for t in g["params"]]
        optimiser = torch.optim.Adam(groups)
        found = []
        table = model.get_input_embeddings()
        for batch in order:
            optimiser.zero_grad()
            total, count = 0.0, 0
            for i in batch:
                rows = torch.cat([prompt, *reversed(self.old)])
                if head is not None:
                    ids = torch.tensor(tokenizer(split.train.texts[i])["input_ids"])
                    text = table(ids)
                    whole = torch.cat([text[:1], rows, text[1:]])[None]
                    states = model(inputs_embeds=whole).last_hidden_state[0]
                    kept = torch.cat([states[:1], states[1 + len(rows) :]]).mean(0)
                    logits = F.linear(kept, *head)[None]
                    labels = torch.tensor([split.train.labels[i]])
                else:
                    word = task.label_words[task.label_names[split.train.labels[i]]]
                    if self.backbone.family == "seq2seq":
                        ids = torch.tensor(tokenizer(split.train.texts[i])["input_ids"])
                        labels = torch.tensor(tokenizer(text_target=word)["input_ids"])
                        whole = torch.cat([rows, table(ids)])[None]
                        logits = model(inputs_embeds=whole, labels=labels[None]).logits[0]
                    else:
                        ids = torch.tensor(
                            tokenizer(split.train.texts[i] + "\nAnswer:")["input_ids"]
                        )
                        labels = torch.tensor(tokenizer(f" {word}")["input_ids"])
                        whole = torch.cat([rows, table(ids), table(labels[:-1])])[None]
                        logits = model(inputs_embeds=whole).logits[0, -len(labels) :]
                total = total + F.cross_entropy(logits, labels, reduction="sum")
                count += len(labels)
            loss = total / count
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, self.settings.clip)
            optimiser.step()
            found.append(float(loss.detach()))
        self.old.append(prompt.detach())
        return found


def test_with_its_parts_switched_off_it_is_progprompt(exact_backbone) -> None:
    """Losses equal to 1e-12 over 20 steps and 3 tasks, in every family."""
    method = method_for(
        exact_backbone, scale=False, shared_length=0, eviction="none", newest_first=True
    )
    reference = MinimalProgPrompt(exact_backbone, method.train)
    state = method.start(0)
    for number in range(3):
        task = make_task(f"task{number}", LABELS[: 2 + number % 2], rows=8, seed=number)
        split = task.split(4, 0)
        lane = method.lane(state, task, split)
        head = [t.clone() for t in part(lane.trained, "head").values()] or None
        prompt = lane.trained["prompt"].clone()
        fit, pack = Fit(lane, method.train), Pack(exact_backbone, [lane], method.train)
        order = []
        for _ in range(20):
            order.append(fit.next_batch())
            pack.step([order[-1]], [fit.step])
        for name, tensor in lane.trained.items():
            tensor.copy_(pack.export(0)[f"parameter.{name}"])
        expected = reference.losses(task, split, prompt, head, order)
        found = pack.take_losses()[:, 0]
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-12
        assert min(expected) < expected[0] - 0.01
        state = lane.finish({})
    registered = method_for(exact_backbone, "prog-prompt")
    assert registered.settings == method.settings


def stream_of(method, count: int, **task_options):
    state, lanes = method.start(0), []
    for number in range(count):
        task = make_task(f"task{number}", rows=8, seed=number, **task_options)
        lane = method.lane(state, task, task.split(4, 0))
        fit_lanes(method.backbone, [lane], method.train)
        state = lane.finish({})
        lanes.append(lane)
    return state, lanes


def test_rows_are_flat_and_trimming_begins_when_the_queue_is_full(bert) -> None:
    state, lanes = stream_of(method_for(bert), 6)
    rows = [len(state.snapshots[f"task{i}"].rows) for i in range(6)]
    assert rows == [4, 6, 8, 8, 8, 8]  # shared 2 + at most 3 prompts of 2
    assert [lane.evicting for lane in lanes] == [False, False, False, True, True, True]
    assert [lane.teacher is not None for lane in lanes] == [False, False, False, True, True, True]


def test_the_queue_keeps_raw_prompts_and_the_snapshot_the_scaled_ones(bert) -> None:
    state, lanes = stream_of(method_for(bert, scale_lr=0.1), 2)
    own = lanes[1].trained
    assert torch.equal(state.queue.rows[2:], own["prompt"])
    u, v = torch.cat([own["u.queue"], own["u.prompt"]]), own["v"]
    assert (u - 1).abs().max() > 1e-3
    expected = state.queue.rows * u[:, None] * v
    assert torch.equal(state.snapshots["task1"].rows[2:], expected)
    assert torch.equal(state.snapshots["task1"].rows[:2], state.shared_prefix)


def test_the_mlp_is_baked_and_the_shared_prefixs_own_is_carried_on(bert) -> None:
    state, lanes = stream_of(method_for(bert, mlp=True, mlp_hidden=8), 2)
    first, second = lanes
    assert torch.equal(state.queue.rows[2:], second.prompt_rows(second.trained))
    carried = method_for(bert, mlp=True, mlp_hidden=8).lane(
        state, make_task("next"), make_task("next").split(4)
    )
    for key, tensor in part(carried.trained, "shared_mlp").items():
        assert torch.equal(tensor, state.shared_mlp[key])
    mlps = [part(lane.trained, "mlp").values() for lane in (first, second)]
    own = zip(*mlps, strict=True)
    assert not all(torch.equal(a, b) for a, b in own)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("all", [True] * 5), ("algorithm1", [True, False, False, True, True])],
)
def test_shared_prefix_schedules(bert, schedule: str, expected: list[bool]) -> None:
    method = method_for(bert, shared_schedule=schedule)
    state, moved = method.start(0), []
    for number in range(5):
        task = make_task(f"task{number}", rows=8)
        after = method.learn(state, task, task.split(4))
        moved.append(not torch.equal(after.shared_prefix, state.shared_prefix))
        state = after
    assert moved == expected


@pytest.mark.parametrize("retention", ["kl", "jsd"])
@pytest.mark.parametrize("mlp", [False, True], ids=["plain", "mlp"])
def test_retention_reaches_the_shared_prefix_and_nothing_else(
    family_backbone, retention: str, mlp: bool
) -> None:
    method = method_for(
        family_backbone, retention=retention, mlp=mlp, mlp_hidden=8, memory_factor=1.0
    )
    state, _ = stream_of(method, 3)
    task = make_task("after", LABELS, rows=8)
    lane = method.lane(state, task, task.split(4))
    task_only = replace(lane.settings, memory_factor=0.0)
    whole, bare = (gradients(family_backbone, each) for each in (lane, without(lane, task_only)))
    reached = {"shared", "shared_mlp", "discriminator"}
    for name, gradient in whole.items():
        moved = gradient - bare[name] if name in bare else gradient
        if name.split(".")[0] not in reached:
            assert moved.abs().max() < 1e-6
        elif gradient.dim() > 1:
            assert moved.abs().max() > 1e-6
    for frozen in family_backbone.model.parameters():
        assert frozen.grad is None


def without(lane, settings):
    """The same lane with other settings, retention decided anew."""
    return type(lane)(lane.backbone, settings, lane.state, make_task("after", LABELS, rows=8),
                      make_task("after", LABELS, rows=8).split(4))  # fmt: skip


def gradients(backbone, lane) -> dict[str, torch.Tensor]:
    pack = Pack(backbone, [lane], make_settings(**{**SMALL, "batch_size": 6})[1])
    pack.forward(*pack.plan([range(6)], [1])).sum().backward()
    return {name: tensor.grad[0] for name, tensor in pack.stacks[0].trained.items()}


def retention_of(backbone, lane) -> float:
    """The retention part of a lane's loss on its first four examples."""
    losses = []
    for each in (lane, without_teacher(lane)):
        pack = Pack(backbone, [each], make_settings(**{**SMALL, "batch_size": 4})[1])
        losses.append(float(pack.forward(*pack.plan([range(4)], [1])).detach()))
    return losses[0] - losses[1]


def without_teacher(lane):
    bare = copy.copy(lane)
    bare.teacher = None
    return bare


def test_retention_is_zero_when_the_shared_prefix_says_what_the_teacher_said(bert) -> None:
    """Teacher [theta*; queue] replaced by theta* alone: new and old are the same distribution."""
    method = method_for(bert, memory_factor=1.0)
    state, _ = stream_of(method, 3)
    state = replace(state, last_layout=state.shared_prefix)
    task = make_task("after", rows=8)
    lane = method.lane(state, task, task.split(4))
    assert lane.teacher is not None
    assert abs(retention_of(bert, lane)) < 1e-6


def test_per_task_prompt_starts_afresh_and_its_long_form_matches_the_rows(bert) -> None:
    state, _ = stream_of(method_for(bert, "per-task-prompt"), 3)
    assert [len(s.rows) for s in state.snapshots.values()] == [2, 2, 2]
    long_state, _ = stream_of(method_for(bert, "per-task-prompt-long"), 2)
    assert [len(s.rows) for s in long_state.snapshots.values()] == [8, 8]  # 2 + 3 * 2


def test_a_lane_starts_from_its_runs_own_numbers(bert) -> None:
    """Same seed, same start, whatever ran before; another seed, another start."""
    task = make_task("a")
    first, again, other = (
        method_for(bert).lane(method_for(bert).start(seed), task, task.split(4))
        for seed in (0, 0, 1)
    )
    torch.randn(100)
    assert torch.equal(first.trained["prompt"], again.trained["prompt"])
    assert torch.equal(first.trained["head.weight"], again.trained["head.weight"])
    assert not torch.equal(first.trained["prompt"], other.trained["prompt"])
    assert torch.equal(
        torch.randperm(9, generator=torch_generator(0, 0, "a", "order")),
        torch.randperm(9, generator=first.order),
    )


def test_the_current_layout_is_what_the_newest_task_sees_without_scale(bert) -> None:
    for name in ("prog-prompt", "q-tuning"):
        state, _ = stream_of(method_for(bert, name, scale=False), 3)
        assert torch.equal(state.current_layout(), state.snapshots["task2"].rows)


def test_before_any_task_the_shared_prefix_goes_through_its_mlp(bert) -> None:
    method = method_for(bert, mlp=True, mlp_hidden=8)
    state = method.start(0)
    lane = method.lane(state, make_task("a"), make_task("a").split(4))
    torch.testing.assert_close(state.current_layout(), lane.shared_rows(lane.tensors))


def test_a_fixed_scale_takes_no_gradient(bert) -> None:
    task = make_task("a")
    lane = method_for(bert, scale=False).lane(method_for(bert).start(0), task, task.split(4))
    assert not {"u.queue", "u.prompt", "v"} & set(lane.trained)
    assert torch.equal(lane.fixed["v"], torch.ones(bert.embed_dim))


def test_a_tiny_model_learns(family_backbone) -> None:
    task = make_task("learnable", rows=24)
    rate = 0.3 if family_backbone.family == "seq2seq" else 0.05
    method = method_for(
        family_backbone, epochs=30, prompt_lr=rate, shared_lr=rate, head_lr=0.05, shots=12
    )
    lane = method.lane(method.start(0), task, task.split(12))
    losses: list[float] = []
    facts = fit_lanes(family_backbone, [lane], method.train, lambda now: losses.append(now.loss))[0]
    assert min(losses) < losses[0] - 0.2
    assert facts["validation_score"] > 0.5


def test_a_task_can_be_asked_with_todays_shared_prefix(bert) -> None:
    method, train = make_settings(**SMALL)
    learner = make_method("q-tuning", bert, method, train)
    state = learner.start(0)
    for i in range(4):
        task = make_task(f"task{i}", rows=8, seed=i)
        state = learner.learn(state, task, task.split(4, 0))
    own, count = state.snapshots["task0"].rows, method.shared_length
    now = state.with_shared(own)
    assert torch.equal(now[:count], state.snapshots["task3"].rows[:count])
    assert not torch.equal(now[:count], own[:count])
    assert torch.equal(now[count:], own[count:])
    latest = state.snapshots["task3"].rows
    assert torch.equal(state.with_shared(latest), latest)
