"""Departures from the paper: what each switch does, and that none of them touches what was learnt before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qtuning.config import make_settings
from qtuning.errors import ConfigError
from qtuning.keys import learn_key, read_features, with_key
from qtuning.lanes import fit_lanes
from qtuning.methods import make_method
from qtuning.warm_start import CANDIDATES, answer_losses, find_start, word_losses
from tests.conftest import SMALL, make_backbone, make_task


def method_for(backbone, name: str = "q-tuning", **settings):
    return make_method(name, backbone, *make_settings(**{**SMALL, **settings}))


def learn(method, state, task, seed: int = 0):
    """The state after one more task with its key, as the stream loop does it, and the lane."""
    split = task.split(4, seed)
    lane = method.lane(state, task, split)
    fit_lanes(method.backbone, [lane], method.train)
    return with_key(lane.finish({}), task.name, learn_key(method.backbone, split)), lane


def learnt(method, count: int):
    state, lanes = method.start(0), []
    for number in range(count):
        state, lane = learn(method, state, make_task(f"task{number}", rows=8, seed=number))
        lanes.append(lane)
    return state, lanes


def test_a_filled_queue_gives_every_task_the_same_rows(bert) -> None:
    state, lanes = learnt(method_for(bert, fill_queue=True), 3)
    assert [len(state.snapshots[f"task{i}"].rows) for i in range(3)] == [8, 8, 8]
    assert [lane.evicting for lane in lanes] == [False, True, True]
    known = bert.embed(torch.tensor(bert.vocabulary))
    first = method_for(bert, fill_queue=True).start(0).queue.rows
    assert len(first) == 4  # room for one prompt of two rows is left
    assert all((known == row).all(dim=-1).any() for row in first)


def test_thawed_rows_are_the_tasks_own_and_the_queue_stays(bert) -> None:
    method = method_for(bert, thaw=True, queue_lr=0.1, eviction="fifo")
    before, _ = learnt(method, 2)
    after, lane = learn(method, before, make_task("next", rows=8, seed=9))
    assert torch.equal(after.queue.rows[:4], before.queue.rows)
    assert (lane.trained["queue_rows"] - before.queue.rows).abs().max() > 1e-3
    for name, snapshot in before.snapshots.items():
        assert torch.equal(after.snapshots[name].rows, snapshot.rows)
    frozen, lane = learn(method_for(bert), before, make_task("next", rows=8, seed=9))
    assert "queue_rows" in lane.fixed
    assert len(frozen.snapshots["next"].rows) == len(after.snapshots["next"].rows)


def test_a_queue_that_keeps_no_prompts_stays_as_it_began(bert) -> None:
    method = method_for(bert, fill_queue=True, keep_prompts=False)
    began = method.start(0).queue.rows
    state, lanes = learnt(method, 3)
    assert torch.equal(state.queue.rows, began)
    assert [lane.evicting for lane in lanes] == [False] * 3  # there is always room
    for lane in lanes:
        assert torch.equal(lane.fixed["queue_rows"], began)
    rows = [state.snapshots[f"task{i}"].rows for i in range(3)]
    assert [len(each) for each in rows] == [8, 8, 8]
    assert not torch.equal(rows[1][-2:], rows[2][-2:])  # each task has a prompt of its own


def test_the_scale_of_old_rows_can_start_small(bert) -> None:
    before, _ = learnt(method_for(bert), 1)
    task = make_task("next", rows=8, seed=9)
    lane = method_for(bert, old_scale=0.25).lane(before, task, task.split(4, 0))
    layout = lane.layout(lane.tensors)
    assert torch.allclose(layout[2:4], 0.25 * before.queue.rows)
    assert torch.equal(layout[4:], lane.trained["prompt"])


@pytest.fixture(scope="module")
def llama():
    return make_backbone("llama")


@pytest.mark.parametrize(("kind", "lines"), [("llama", True), ("llama", False), ("t5", False)])
def test_a_warm_start_is_the_prompt_of_the_task_with_the_lowest_loss(
    kind: str, lines: bool
) -> None:
    backbone = make_backbone(kind)
    backbone.may_read_lines = lines
    method = method_for(backbone, warm_start="loss", epochs=8, prompt_lr=0.1)
    state, _ = learnt(method, 3)
    task = make_task("next", rows=8, seed=1)  # the texts of task1 again
    split = task.split(4, 0)
    lane = method.lane(state, task, split)
    by_hand = {
        name: reference_loss(backbone, snapshot, task, split)
        for name, snapshot in state.snapshots.items()
    }
    best = min(by_hand, key=by_hand.get)
    assert lane.start.source.card.name == best
    assert lane.start.cost == pytest.approx(by_hand[best], abs=1e-4)
    assert torch.equal(lane.trained["prompt"], state.snapshots[best].rows[-2:])
    found = word_losses(backbone, list(state.snapshots.values()), split.train, lane.answers)
    assert found == pytest.approx(list(by_hand.values()), abs=1e-4)
    after, _ = learn(method, state, task)
    facts = after.snapshots["next"].facts
    assert (facts["source"], facts["source_cost"]) == (best, lane.start.cost)


def reference_loss(backbone, snapshot, task, split) -> float:
    """Mean negative log-probability of the answers' tokens, text by text, with transformers alone."""
    model, tokenizer = backbone.model, backbone.tokenizer
    table, total, count = model.get_input_embeddings(), 0.0, 0
    for text, label in zip(split.train.texts, split.train.labels, strict=True):
        word = task.label_words[task.label_names[label]]
        if backbone.family == "seq2seq":
            ids = torch.tensor(tokenizer(text)["input_ids"])
            labels = torch.tensor(tokenizer(text_target=word)["input_ids"])
            whole = torch.cat([snapshot.rows, table(ids)])[None]
            logits = model(inputs_embeds=whole, labels=labels[None]).logits[0]
        else:
            ids = torch.tensor(tokenizer(text + "\nAnswer:")["input_ids"])
            labels = torch.tensor(tokenizer(f" {word}")["input_ids"])
            whole = torch.cat([snapshot.rows, table(ids), table(labels[:-1])])[None]
            logits = model(inputs_embeds=whole).logits[0, -len(labels) :]
        total += float(F.cross_entropy(logits, labels, reduction="sum").detach())
        count += len(labels)
    return total / count


def test_a_warm_start_by_key_takes_the_task_with_the_nearest_texts(bert) -> None:
    method = method_for(bert, warm_start="key")
    state, _ = learnt(method, 4)
    chosen = set()
    for number in range(4, 10):
        task = make_task("next", rows=8, seed=number)
        split = task.split(4, 0)
        features = read_features(bert, split.train.texts).double().numpy()
        similarity = {}
        for name, snapshot in state.snapshots.items():
            own = (features - snapshot.key.mean.numpy()) / snapshot.key.spread.numpy()
            own = own / np.linalg.norm(own, axis=1, keepdims=True)
            similarity[name] = float((own @ snapshot.key.vector.numpy()).mean())
        found = method.lane(state, task, split).start.source.card.name
        assert found == max(similarity, key=similarity.get)
        chosen.add(found)
    assert len(chosen) > 1  # it depends on the texts


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_warm_start_by_answers_is_taken_only_if_it_beats_guessing(kind: str, monkeypatch) -> None:
    backbone = make_backbone(kind)
    method = method_for(backbone, warm_start="answers", epochs=4, prompt_lr=0.1)
    state, lanes = learnt(method, 3)
    known, answers = state.snapshots, lanes[0].answers
    task = make_task("next", rows=8, seed=1)
    split = task.split(4, 0)
    by_hand = [reference_answer_loss(backbone, each, task, split) for each in known.values()]
    assert answer_losses(backbone, list(known.values()), split.train, answers) == pytest.approx(
        by_hand, abs=1e-4
    )
    for losses, source in ([0.8, 0.69, 0.9], "task1"), ([0.8, 0.70, 0.9], None):  # log 2 = 0.693
        monkeypatch.setattr("qtuning.warm_start.answer_losses", lambda *_, found=losses: found)
        found = find_start(backbone, method.settings, known, split, answers)
        assert (found.source and found.source.card.name) == source
        assert found.cost == min(losses)


def reference_answer_loss(backbone, snapshot, task, split) -> float:
    """Mean of -log p(right label | one of the labels), from `reference_loss` of one text and label at a time."""
    total, words = 0.0, [task.label_words[name] for name in task.label_names]
    sizes = [len(sequence) for sequence in backbone.answers(words).sequences]
    for i, right in enumerate(split.train.labels):
        costs = []
        for label, size in enumerate(sizes):
            row = replace(split, train=replace(split.train.at([i]), labels=(label,)))
            costs.append(-size * reference_loss(backbone, snapshot, task, row))
        total -= float(F.log_softmax(torch.tensor(costs), dim=0)[right])
    return total / len(split.train)


@pytest.mark.parametrize("kind", ["loss", "answers"])
def test_without_earlier_tasks_a_prompt_starts_from_the_vocabulary(llama, kind: str) -> None:
    task = make_task("first", rows=8)
    warm, cold = method_for(llama, warm_start=kind), method_for(llama)
    lanes = [m.lane(m.start(0), task, task.split(4, 0)) for m in (warm, cold)]
    assert (lanes[0].start.source, lanes[0].start.cost) == (None, None)
    assert torch.equal(lanes[0].trained["prompt"], lanes[1].trained["prompt"])


@pytest.mark.parametrize("kind", ["loss", "answers"])
def test_an_encoder_refuses_to_measure_losses_and_says_what_to_use(bert, kind: str) -> None:
    with pytest.raises(ConfigError, match="use warm_start 'key'"):
        method_for(bert, warm_start=kind)


def test_the_number_of_tasks_read_and_asked_does_not_grow(llama, monkeypatch) -> None:
    class Counting(dict):
        def __getitem__(self, name):
            read.append(name)
            return super().__getitem__(name)

    method = method_for(llama, warm_start="loss")
    state, lanes = learnt(method, 1)
    known = Counting({f"copy{i}": state.snapshots["task0"] for i in range(2 * CANDIDATES)})
    read, asked = [], []
    monkeypatch.setattr(
        "qtuning.warm_start.word_losses",
        lambda _, given, *rest: asked.extend(given) or [1.0] * len(given),
    )
    split = make_task("next", rows=8).split(4, 0)
    find_start(llama, method.settings, known, split, lanes[0].answers)
    assert len(asked) == CANDIDATES
    assert read == [f"copy{i}" for i in range(CANDIDATES, 2 * CANDIDATES)]


def test_a_start_by_place_asks_nobody(bert) -> None:
    carried, lanes = learnt(method_for(bert, "q-tuning-plus", warm_start="latest"), 3)
    for before, lane in zip(["task0", "task1"], lanes[1:], strict=True):
        assert torch.equal(lane._first_prompt(), carried.snapshots[before].rows)
    fixed, lanes = learnt(method_for(bert, "q-tuning-plus", warm_start="first"), 3)
    for lane in lanes[1:]:
        assert torch.equal(lane._first_prompt(), fixed.snapshots["task0"].rows)
    assert lanes[0].start.source is None
    facts = fixed.snapshots["task2"].facts
    assert facts["source"] == "task0"
    assert "source_cost" not in facts


def test_nobody_learns_from_an_imported_prompt(llama) -> None:
    method = method_for(llama, warm_start="loss")
    state, lanes = learnt(method, 1)
    foreign = replace(
        state.snapshots["task0"], rows=torch.zeros(1, 32), facts={"imported_from": "x"}
    )
    split = make_task("next", rows=8).split(4, 0)
    answers = lanes[0].answers
    assert find_start(llama, method.settings, {"foreign": foreign}, split, answers).source is None
    both = {**state.snapshots, "foreign": foreign}
    for kind, names in (("loss", both), ("latest", both), ("first", dict(reversed(both.items())))):
        found = find_start(llama, replace(method.settings, warm_start=kind), names, split, answers)
        assert found.source is state.snapshots["task0"], kind


def test_the_newest_first_order_takes_the_right_rows(llama) -> None:
    method = method_for(llama, "prog-prompt", warm_start="loss")
    state, _ = learnt(method, 2)
    task = make_task("next", rows=8, seed=9)
    lane = method.lane(state, task, task.split(4, 0))
    assert torch.equal(
        lane.trained["prompt"], state.snapshots[lane.start.source.card.name].rows[:2]
    )


def test_plus_is_the_long_prompt_with_a_start(family_backbone) -> None:
    plus, long = (
        method_for(family_backbone, name) for name in ("q-tuning-plus", "per-task-prompt-long")
    )
    usual = "key" if family_backbone.needs_head else "answers"
    assert plus.settings == replace(long.settings, warm_start=usual)
    if family_backbone.needs_head:
        return
    asked = method_for(family_backbone, "q-tuning-plus", warm_start="loss")
    assert asked.settings.warm_start == "loss"


def test_plus_learns_what_the_control_learns_until_an_earlier_task_helps(
    llama, monkeypatch
) -> None:
    plus, long = (method_for(llama, name) for name in ("q-tuning-plus", "per-task-prompt-long"))
    task = make_task("next", rows=8, seed=9)
    for losses, helps in ([2.0, 2.0], False), ([2.0, 0.1], True):
        monkeypatch.setattr("qtuning.warm_start.answer_losses", lambda *_, found=losses: found)
        state = learnt(long, 2)[0]
        one, lane = learn(plus, state, task)
        other, _ = learn(long, state, task)
        assert (lane.start.source is not None) == helps
        assert torch.equal(one.snapshots["next"].rows, other.snapshots["next"].rows) != helps
        if helps:
            fresh = plus.lane(state, task, task.split(4, 0))
            assert torch.equal(fresh.trained["prompt"], state.snapshots["task1"].rows)
