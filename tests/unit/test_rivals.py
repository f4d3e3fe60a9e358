"""What defines each rival, against independent references."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qtuning.backbones import Row
from qtuning.backbones.extents import CPU_UNIT
from qtuning.config import make_settings
from qtuning.evaluation import backward_transfer
from qtuning.keys import read_features
from qtuning.methods import lfpt5, make_method, rehearsing
from qtuning.methods.ewc import EWCHooks, fisher_diagonal
from qtuning.methods.idbr import feature_penalty, kmeans_choice, next_sentence_rows
from qtuning.methods.lfpt5 import read_sample, write_sample
from qtuning.methods.mbpa import nearest
from qtuning.methods.multitask import JointHooks
from qtuning.methods.rehearsing import LFPT5Loss
from qtuning.methods.replaying import ReplayHooks, Together, choose_memory, project, recall
from qtuning.pack import Pack
from qtuning.seeding import numpy_generator
from qtuning.snapshots import TaskCard, answering, predict_log_probs
from qtuning.stream_loop import run_stream
from qtuning.tasks import Rows
from qtuning.weights import make_examples, make_head, read_weights, trainable_copy
from tests.conftest import SMALL, make_backbone, make_task

PRODUCT = {
    "bert": "encoder.layer.0.attention.self.query",
    "gpt2": "transformer.h.0.attn.c_attn",
    "llama": "model.layers.0.self_attn.q_proj",
    "t5": "encoder.block.0.layer.1.DenseReluDense.wi",
}
"""A module whose product is read off."""


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


def test_ewc_adds_the_gradient_of_its_penalty() -> None:
    """Of lambda / 2 sum F (theta - theta*)^2, by autograd; a weight that no task used has no gradient to add to."""
    generator = torch.Generator().manual_seed(0)
    now, then, fisher = (
        {n: torch.rand(s, generator=generator) for n, s in (("w", (3, 2)), ("b", (4,)))}
        for _ in "abc"
    )
    unused = {"unused": torch.ones(2, requires_grad=True)}
    now = {n: t.requires_grad_() for n, t in now.items()} | unused
    nothing = {"unused": torch.zeros(2)}
    hooks = EWCHooks(now, then | nothing, fisher | nothing, 10.0)
    terms = [(fisher[n] * (now[n] - then[n]).square()).sum() for n in "wb"]
    expected = torch.autograd.grad(5 * sum(terms), [now["w"], now["b"]])
    for n in "wb":
        now[n].grad = torch.ones_like(now[n])
    hooks.edit_gradients(list(now.values()))
    for n, gradient in zip("wb", expected, strict=True):
        torch.testing.assert_close(now[n].grad, 1 + gradient)
    assert now["unused"].grad is None


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
        if not name.endswith("key.bias"):  # whose gradient is 0 but for rounding
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


# ── memory ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", PRODUCT)
def test_a_model_and_its_copy_go_without_the_garbage_collector(kind: str) -> None:
    """One run after another must not hold the models of both."""
    gc.collect()
    gc.disable()
    try:
        backbone, task = make_backbone(kind), make_task("task", rows=8)
        method = method_for(backbone, "ewc")
        state = method.learn(method.start(0), task, task.split(4))
        models = [weakref.ref(backbone.model), weakref.ref(method.worker.model)]
        del backbone, method, state
        assert [model() for model in models] == [None, None]
    finally:
        gc.enable()


def test_weights_are_kept_in_one_piece(bert) -> None:
    kept = read_weights(bert)
    (storage,) = {weight.untyped_storage().data_ptr() for weight in kept.values()}
    for name, weight in bert.model.named_parameters():
        torch.testing.assert_close(kept[name], weight, rtol=0, atol=0)
        assert weight.untyped_storage().data_ptr() != storage


# ── half precision ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", PRODUCT)
def test_weights_of_a_half_precision_model_are_trained_in_full(kind: str) -> None:
    """Steps of 1e-6 are a thousandth of what bfloat16 can tell apart; products in it are right to two digits."""
    task = make_task("task", rows=8)
    states = {}
    for dtype in (torch.float32, torch.bfloat16):
        backbone = make_backbone(kind, dtype=dtype)
        method = method_for(backbone, "continual-finetune", weights_lr=1e-6, epochs=2)
        states[dtype] = method.learn(method.start(0), task, task.split(4))
    half = states[torch.bfloat16]
    before = {n: w.float() for n, w in backbone.model.named_parameters()}
    assert {w.dtype for w in half.weights.values()} == {torch.float32}
    moved = [not torch.equal(w, before[n]) for n, w in half.weights.items()]
    assert sum(moved) > 0.9 * len(moved)
    assert {w.dtype for w in backbone.model.parameters()} == {torch.bfloat16}
    read: list[torch.dtype] = []
    product = half.worker.model.get_submodule(PRODUCT[kind])
    product.register_forward_hook(lambda module, given, out: read.append(out.dtype))
    full, found = (
        predict_log_probs(*state.answers(backbone, "task"), task.texts[:6])
        for state in states.values()
    )
    assert set(read) == {torch.bfloat16}
    torch.testing.assert_close(found, full, rtol=0.05, atol=0.05)


# ── compiled layers ──────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [(k, "continual-finetune") for k in ("bert", "gpt2", "llama", "t5")]
    + [("bert", n) for n in ("a-gem", "ewc", "multi-task", "replay", "mbpa++", "idbr")],
)
def test_weights_are_trained_compiled_as_eager(kind: str, name: str) -> None:
    """float64: 1e-9, Llama 1e-6 (its norm rounds to float32), a layer's gradients as any other's."""
    tasks = [make_task(f"task{i}", rows=8, seed=i) for i in range(2)]
    found = []
    for mode in ("off", "dynamic"):
        backbone = make_backbone(kind, dtype=torch.float64)
        backbone.compile = mode
        method = method_for(backbone, name, weights_lr=1e-3, epochs=2, replay_every=1)
        state = method.start(0)
        for task in tasks:
            state = method.learn(state, task, task.split(4))
        assert method.worker.is_compiled == (mode == "dynamic")
        answers = [
            predict_log_probs(worker, snapshot, [task.texts[i] for i in places])
            for task in tasks
            for worker, snapshot, places in answering(backbone, state, task.name, task.texts[:3])
        ]
        found.append((state.weights, answers))
    close = {"rtol": 0, "atol": 1e-6 if kind == "llama" else 1e-9}
    for weight, n in ((w, n) for n, w in found[0][0].items() if not n.endswith("key.bias")):
        torch.testing.assert_close(found[1][0][n], weight, **close)
    torch.testing.assert_close(found[1][1], found[0][1], **close)


@pytest.mark.parametrize("name", ["continual-finetune", "multi-task", "idbr", "ewc"])
def test_weights_that_cannot_be_trained_compiled_are_trained_without(
    bert, monkeypatch, name: str
) -> None:
    """The backward pass of compiled layers fails; nothing was drawn, moved or kept by then."""
    tasks = [make_task(f"task{i}", rows=8, seed=i) for i in range(2)]
    grad, refused = torch.autograd.grad, []

    def refuse(*args, **options):
        if refused and refused[-1].is_compiled:
            raise RuntimeError("no compiler found\nand a long trace")
        return grad(*args, **options)

    def layers(backbone):
        refused.append(backbone)
        return nullcontext()

    found = []
    for mode in ("off", "on"):
        bert.compile = mode
        method = method_for(bert, name, epochs=2)
        state = method.start(0)
        if mode == "on":
            monkeypatch.setattr(type(method.worker), "training_layers", layers)
            monkeypatch.setattr(torch.autograd, "grad", refuse)
            with pytest.warns(
                UserWarning, match=r"trained without compiling \(RuntimeError: no compiler found\)"
            ):
                state = method.learn(state, tasks[0], tasks[0].split(4))
            assert not method.worker.is_compiled
        else:
            state = method.learn(state, tasks[0], tasks[0].split(4))
        found.append(method.learn(state, tasks[1], tasks[1].split(4)).weights)
    assert all(torch.equal(found[1][n], weight) for n, weight in found[0].items())


def test_a_copy_of_a_half_precision_model_has_layers_of_its_own() -> None:
    worker = trainable_copy(make_backbone("bert", dtype=torch.bfloat16))
    twin = worker.twin()
    layer = twin.model.get_submodule(PRODUCT["bert"])
    seen: list[torch.dtype] = []
    layer.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    read_features(twin, ["good soup"])
    assert seen == [torch.bfloat16]


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
    assert float(weight.detach()) > 0.5


def test_examples_of_several_tasks_are_read_together_as_alone(exact_backbone) -> None:
    worker = trainable_copy(exact_backbone)
    memories = []
    for seed, repeats in enumerate((1, 12, 2)):
        task = make_task(f"task{seed}", rows=8, seed=seed)
        texts = tuple(" ".join([text] * repeats) for text in task.texts)
        labels = [task.label_names.index(label) for label in task.labels]
        head = make_head(worker, len(task.label_names), torch.Generator().manual_seed(seed))
        memories.append(make_examples(worker, task, Rows(texts, labels), head))
    where = [(m, i) for i in range(8) for m in (1, 0)] + [(2, 1)]
    together = Together(memories, where)
    assert len(together.passes) > 1  # long texts and short ones
    every = list(range(8))
    alone = torch.stack([memories[1].loss(every), memories[0].loss(every), memories[2].loss([1])])
    torch.testing.assert_close(together.losses(), alone, rtol=0, atol=1e-9)
    mean = (alone * torch.tensor([8, 8, 1]) / 17).sum()
    torch.testing.assert_close(together.mean_loss(), mean, rtol=0, atol=1e-9)
    weights = list(worker.model.parameters())
    found, expected = (
        torch.autograd.grad(loss, weights, materialize_grads=True, allow_unused=True)
        for loss in (together.losses().sum(), alone.sum())
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_answers_shorter_than_the_longest_are_read_together_too(exact_backbone) -> None:
    """A batch that has none of a task's longest label words."""
    if exact_backbone.needs_head:
        pytest.skip("an encoder answers with its head")
    worker = trainable_copy(exact_backbone)
    task = make_task("task", ("up", "very good and far"), rows=8)
    labels = [task.label_names.index(label) for label in task.labels]
    memory = make_examples(worker, task, Rows(task.texts, labels), None)
    short = [i for i, label in enumerate(labels) if label == 0]
    sizes = [len(memory.answers.sequences[label]) for label in (0, 1)]
    assert sizes[0] < sizes[1]
    together = Together([memory], [(0, i) for i in short])
    torch.testing.assert_close(together.losses()[0], memory.loss(short), rtol=0, atol=1e-9)


def test_multi_task_training_sees_every_task_in_every_step(monkeypatch) -> None:
    seen: list[tuple[int, int]] = []

    class Read:
        def __init__(self, others, where):
            seen.extend(where)

        def losses(self):
            return torch.tensor([9.0, 25.0])

    monkeypatch.setattr("qtuning.methods.multitask.Together", Read)
    hooks = JointHooks(["aaa", "bbbbb"], 2, torch.Generator().manual_seed(0))
    for _ in range(6):
        assert float(hooks.penalty([])) == 9 + 25  # the sum of both losses
        assert {task for task, _ in seen[-4:]} == {0, 1}
    drawn = [place for task, place in seen if task == 0]
    assert sorted(drawn[:3]) == sorted(drawn[3:6]) == [0, 1, 2]  # a short task begins again


def test_in_a_stream_multi_task_training_waits_for_the_last_task(family_backbone) -> None:
    """As many steps as the longest task takes, wherever that stands; the last row alone is measured."""
    method, train = make_settings(**{**SMALL, "batch_size": 4, "epochs": 3})
    tasks = [make_task("task0", ("up", "down", "left"), rows=10), make_task("task1", rows=10)]
    learner = make_method("multi-task", family_backbone, method, train)
    seen = []
    result = run_stream(learner, family_backbone, tasks, train, report=seen.append)
    assert {progress.task for progress in seen} == {"task1"}
    rows = [len(result.splits[task.name].train) for task in tasks]
    steps = [-(-n // 4) for n in rows]
    assert steps[0] > steps[1]
    assert len(seen) == -(-3 * steps[0] // steps[1])
    assert list(result.state.memory) == ["task0", "task1"]
    assert np.isnan(result.matrix[:2]).all()
    assert not np.isnan(result.matrix[2]).any()


def test_a_memory_survives_saving(bert, tmp_path) -> None:
    from qtuning import QTuner

    tuner = QTuner(bert, method="replay", **SMALL)
    tuner.learn(make_task("first", rows=10), progress=False)
    tuner.save_pretrained(tmp_path / "c")
    loaded = QTuner.from_pretrained(tmp_path / "c", model=bert)
    assert loaded.state.memory == tuner.state.memory
    assert len(loaded.state.memory["first"]["texts"]) == 2


# ── MBPA++ ───────────────────────────────────────────────────────────────────────────────────


def test_neighbours_are_the_exact_euclidean_ones() -> None:
    """Of keys with very different lengths, for which a dot product would choose others."""
    generator = np.random.default_rng(0)
    keys = generator.normal(size=(50, 8)) * generator.uniform(0.1, 10, size=(50, 1))
    asked = generator.normal(size=8)
    expected = np.argsort(np.linalg.norm(keys - asked, axis=1))[:7]
    assert nearest(torch.tensor(asked), torch.tensor(keys), 7) == expected.tolist()
    assert set(expected) != set(np.argsort(-(keys @ asked))[:7])


def test_local_adaptation_helps_its_neighbours_and_is_undone(family_backbone) -> None:
    tasks = [make_task(f"task{i}", rows=10, seed=i) for i in range(2)]
    method = method_for(family_backbone, "mbpa++", local_lr=1e-2, local_steps=5, neighbours=1)
    state = method.start(0)
    for task in tasks:
        state = method.learn(state, task, task.split(4))
    assert len(state.memory["task0"]["texts"]) == 8  # every training example
    text = state.memory["task0"]["texts"][0]
    before = {n: t.clone() for n, t in read_weights(state.worker).items()}
    ((own, places),) = state._neighbours(text, {}).parts
    assert places == [0]
    assert own.tokens == state.worker.tokenize([text], 0, own.answers.longest)
    gold = state.memory["task0"]["labels"][0]
    plain = predict_log_probs(*state.answers(family_backbone, "task0"), [text])[0]
    with state.adapted("task0", text) as (model, snapshot):
        assert any(not torch.equal(t, before[n]) for n, t in read_weights(model).items())
        adapted = predict_log_probs(model, snapshot, [text])[0]
    assert adapted[gold] > plain[gold]  # its neighbour is the text itself
    assert all(torch.equal(t, before[n]) for n, t in read_weights(state.worker).items())
    again = predict_log_probs(*state.answers(family_backbone, "task0"), [text])[0]
    assert torch.equal(plain, again)


def test_one_step_of_adaptation_by_hand(bert) -> None:
    """W - lr (gradient of the mean loss): the penalty is 0 where it begins."""
    task = make_task("task", rows=10)
    method = method_for(bert, "mbpa++", local_lr=0.1, local_steps=1, neighbours=3)
    state = method.learn(method.start(0), task, task.split(4))
    text = "good soup"
    bias = state.heads["task"].bias
    keys = state.extra["keys.task"]
    key = read_features(bert, [text])[0].to(keys)
    chosen = (keys - key).norm(dim=1).argsort()[:3].tolist()
    rows = Rows(
        tuple(state.memory["task"]["texts"][i] for i in chosen),
        tuple(state.memory["task"]["labels"][i] for i in chosen),
    )
    found = predict_log_probs(*state.answers(bert, "task"), rows.texts).exp()
    expected = bias - 0.1 * (found - F.one_hot(torch.tensor(rows.labels), 2)).mean(dim=0)
    with state.adapted("task", text) as (_, snapshot):
        torch.testing.assert_close(snapshot.head.bias, expected, rtol=0, atol=1e-5)


def test_a_method_that_adapts_to_every_text_measures_the_last_row_alone(bert) -> None:
    settings = make_settings(**{**SMALL, "local_steps": 1, "epochs": 1})
    tasks = [make_task(f"task{i}", rows=10, seed=i) for i in range(2)]
    method = make_method("mbpa++", bert, *settings)
    result = run_stream(method, bert, tasks, settings[1], test_limit=1)
    assert not np.isnan(result.matrix[2]).any()
    assert np.isnan(result.matrix[:2]).all()
    assert result.unchanged == {"task0": None, "task1": None}


# ── IDBR ─────────────────────────────────────────────────────────────────────────────────────


def test_next_sentence_pairs_are_halves_of_one_text_or_of_two() -> None:
    texts = ["a b c d", "e f g h i", ("j k", "l m"), "n"]
    rows = next_sentence_rows(texts, torch.Generator().manual_seed(0))
    assert rows.texts[:4] == (("a b", "c d"), ("e f", "g h i"), ("j k", "l m"), ("n", "n"))
    assert rows.labels == (0, 0, 0, 0, 1, 1, 1, 1)
    seconds = [second for _, second in rows.texts[:4]]
    for i, (first, second) in enumerate(rows.texts[4:]):
        assert first == rows.texts[i][0]
        assert second in seconds
        assert second != rows.texts[i][1]


def test_the_feature_penalty_by_hand() -> None:
    now, before = torch.zeros(2, 256), torch.zeros(2, 256)
    now[0, 0], now[1, 200] = 2.0, 4.0  # one general feature moved by 2, one specific by 4
    assert float(feature_penalty(now, before)) == pytest.approx(0.5 * (4 + 16) / 256)
    assert float(feature_penalty(now, now)) == 0.0


def test_kmeans_keeps_the_rows_nearest_to_well_separated_centres() -> None:
    spread = np.random.default_rng(0)
    middles = np.array([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    rows = np.concatenate([m + spread.normal(size=(9, 2)) for m in middles])
    rows[[4, 13, 22]] = [rows[9 * k : 9 * k + 9].mean(axis=0) for k in range(3)]
    chosen = kmeans_choice(torch.tensor(rows), 3, seed=1)
    expected = []
    for k in range(3):
        own = rows[9 * k : 9 * k + 9]
        distance = np.linalg.norm(own - own.mean(axis=0), axis=1)
        expected.append(9 * k + int(distance.argmin()))
    assert chosen == sorted(expected)


@pytest.mark.filterwarnings("ignore:Number of distinct clusters")
def test_kmeans_keeps_as_many_as_asked_even_of_equal_rows() -> None:
    assert len(set(kmeans_choice(torch.ones(5, 2), 3, seed=1))) == 3


def test_idbr_trains_its_two_features_for_different_things(bert) -> None:
    """Next-sentence gradients reach the general encoder only, task gradients the specific one."""
    method = method_for(bert, "idbr", replay_every=1, weights_lr=1e-3)
    tasks = [make_task(f"task{i}", rows=10, seed=i) for i in range(2)]
    state = method.learn(method.start(0), tasks[0], tasks[0].split(4))
    assert len(state.memory["task0"]["texts"]) == 2
    parts = method.worker.model.idbr
    examples = recall(method.worker, state.memory["task0"], None)
    studied = method._study(
        examples, tuple(state.memory["task0"]["texts"]), 0, torch.Generator().manual_seed(0), False
    )
    assert float(studied.held([0, 1]).detach()) == 0.0  # nothing has moved yet
    own = [parts["general"].weight, parts["specific"].weight]
    general, specific = torch.autograd.grad(
        studied.next_loss([0, 1], torch.Generator().manual_seed(0)), own, allow_unused=True
    )
    assert general.abs().sum() > 0
    assert specific is None or specific.abs().sum() == 0
    general, specific = torch.autograd.grad(studied.task_loss([0, 1]), own, allow_unused=True)
    assert general is None or general.abs().sum() == 0
    assert specific.abs().sum() > 0
    before = method._features(examples)
    method.learn(state, tasks[1], tasks[1].split(4))
    assert not torch.equal(method._features(examples), before)


# ── LFPT5 ────────────────────────────────────────────────────────────────────────────────────


CARD = TaskCard("soups", ("neg", "pos"), {"neg": "negative", "pos": "very positive"})


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("good soup Answer: very positive", ("good soup", 1)),
        (" cold  soup Answer : Negative ", ("cold  soup", 0)),
        ("Answer: odd Answer: negative", ("Answer: odd", 0)),
        ("good soup Answer: neutral", None),
        ("Answer: negative", None),
        ("good soup", None),
        ("", None),
    ],
)
def test_pseudo_samples_are_read_back_or_dropped(written: str, expected) -> None:
    assert read_sample(written, CARD) == expected


def test_what_is_written_can_be_read_back() -> None:
    assert read_sample(write_sample("good soup", "very positive"), CARD) == ("good soup", 1)
    pairs = replace(CARD, is_pair=True)
    found = read_sample(write_sample(("one two", "three four"), "negative"), pairs)
    assert found == (("one two", "three four"), 0)


def loss_for(method, task, pseudo, old, prompt) -> LFPT5Loss:
    rows = task.split(4).train
    train = make_examples(method.view, task, rows, None, prompt)
    writing = method._writing(TaskCard.of(task), rows, prompt)
    return LFPT5Loss(train, writing, pseudo, old, method.settings, method.backbone)


def counting(true, calls):
    """The same function, which notes with what it was called."""

    def called(*given, **named):
        calls.append(named)
        return true(*given, **named)

    return called


def move(prompt: torch.Tensor) -> None:
    with torch.no_grad():
        prompt += torch.randn(prompt.shape, generator=torch.Generator().manual_seed(0)).to(prompt)


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_lfpt5_rehearses_what_it_wrote(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = make_backbone(kind)
    method = method_for(backbone, "lfpt5", pseudo_samples=3, prompt_lr=0.1)
    first, second = make_task("first", rows=10), make_task("second", rows=10, seed=3)
    state = method.learn(method.start(0), first, first.split(4))
    written = method._write(["first"] * 4, state.prompt, seed=1)
    assert len(written) == 4
    assert written == method._write(["first"] * 4, state.prompt, seed=1)  # by its own seed
    good = ["good soup Answer : positive", "nonsense", "bad bread Answer : negative"]
    monkeypatch.setattr(method, "_write", lambda *_: good)
    rows = method.pseudo_samples(state)["first"]
    names = state.snapshots["first"].card.label_names
    assert rows.texts == ("good soup", "bad bread")
    assert [names[label] for label in rows.labels] == ["positive", "negative"]
    prompt = state.prompt.clone().requires_grad_()
    pseudo = make_examples(method.view, state.snapshots["first"].card, rows, None, prompt)
    loss = loss_for(method, second, [pseudo], state.prompt, prompt)
    again = loss.pseudo.hidden(range(2))
    assert float(loss.rehearsal(again).detach()) == pytest.approx(0.0, abs=1e-6)  # nothing moved
    move(prompt)
    again = loss.pseudo.hidden(range(2))
    assert float(loss.rehearsal(again).detach()) > 1e-4
    after = method.learn(state, second, second.split(4))
    assert after.snapshots["second"].facts["pseudo_samples"] == 2
    _, today = after.answers(backbone, "first")
    assert torch.equal(today.rows, after.prompt)
    assert not torch.equal(after.prompt, state.prompt)


@pytest.mark.parametrize("way", ["on a card", "padded", "texts read once"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "bart"])
def test_lfpt5_reads_all_tasks_in_as_few_passes_as_apart(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task, writing and each earlier task by passes of their own: the same loss and gradient, float64."""
    monkeypatch.setattr(rehearsing, "_share_a_pass", lambda device: way == "on a card")
    if way != "texts read once":
        monkeypatch.setattr(rehearsing, "_reads_texts_once", lambda *_: False)
    backbone = make_backbone(kind, dtype=torch.float64)
    method = method_for(backbone, "lfpt5", pseudo_share=0.3, lm_weight=0.7)
    tasks = [
        make_task("first", ("negative", "positive"), rows=3),
        make_task("second", ("report problem", "how to status", "neutral"), rows=4, seed=1),
        make_task("third", ("sport", "world"), rows=10, seed=2),
    ]
    old = method._first_prompt(0, TaskCard.of(tasks[0]))
    prompt = old.clone().requires_grad_()
    pseudo = [
        make_examples(method.view, t, Rows(tuple(t.texts), (0,) * len(t.texts)), None, prompt)
        for t in tasks[:2]
    ]
    loss = loss_for(method, tasks[2], pseudo, old, prompt)
    move(prompt)

    def first_log_probs(examples):
        hidden = examples.hidden(range(len(examples)))
        return F.log_softmax(method.view.logits(hidden, None)[:, 0], dim=-1)

    batch = [3, 0, 5]
    expected = loss.train.loss(batch) + 0.7 * loss.writing.loss(batch)
    for each in pseudo:
        before = first_log_probs(replace(each, prompt=old)).detach()
        now = first_log_probs(each)
        expected = expected + 0.3 / 0.7 * (before.exp() * (before - now)).sum(dim=-1).mean()
    loss.loss(batch)  # reads what is read once
    reads, positions, kind_of = [], [], type(method.view)
    for name in {"hidden", "hidden_after"} & set(vars(kind_of)):
        monkeypatch.setattr(kind_of, name, counting(getattr(kind_of, name), reads))
    model = backbone.model.base_model
    monkeypatch.setattr(model, "forward", counting(model.forward, positions))
    found = loss.loss(batch)
    assert len(reads) == (2 if way == "on a card" else 3)
    if way == "texts read once" and backbone.family == "causal":
        task, again, writing = (named["inputs_embeds"].shape[:2].numel() for named in positions)
        rows = len(prompt)  # and the last token of a text, and answers
        assert task <= len(batch) * (rows + 4) < sum(loss.train.lengths[i] for i in batch)
        assert again <= len(loss.pseudo) * (rows + 2) < sum(loss.pseudo.lengths)
        assert writing < sum(loss.writing.lengths[i] for i in batch) - 2 * rows + CPU_UNIT
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    gradients = [torch.autograd.grad(each, prompt)[0] for each in (found, expected)]
    # llama's norms are in float32, whatever its weights are
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-7 if kind == "llama" else 1e-9)


@pytest.mark.parametrize("kind", ["gpt2", "bart"])
def test_lfpt5_cuts_what_it_wrote_at_the_end(kind: str) -> None:
    """A tokenizer without a token to pad with pads with a word."""
    backbone = make_backbone(kind, dtype=torch.float64)
    method = method_for(backbone, "lfpt5")
    prompt = method._first_prompt(0, TaskCard.of(make_task("task")))
    (whole,) = method._write(["soup"], prompt, seed=1, do_sample=False)
    words = backbone.tokenizer(whole, add_special_tokens=False)["input_ids"]
    backbone.model.generation_config.eos_token_id = [words[4]]
    backbone.model.generation_config.forced_eos_token_id = None
    backbone.pad_id = words[0]
    names = ["soup", "good bread and cold soup"]
    short = method._write(names, prompt, seed=1, do_sample=False)
    assert short[0] == backbone.tokenizer.decode(words[: words.index(words[4])])
    # the shorter of the two is padded by the longer, and says what it says alone
    assert short == [method._write([n], prompt, seed=1, do_sample=False)[0] for n in names]
    assert len({len(backbone.tokenizer(s)["input_ids"]) for s in short}) == 2


@pytest.mark.parametrize("kind", ["gpt2", "llama", "opt", "t5", "bart"])
def test_lfpt5_writes_for_all_tasks_at_once_as_for_each(kind: str) -> None:
    """Names of different lengths; the likeliest words are those of the name alone."""
    method = method_for(make_backbone(kind, dtype=torch.float64), "lfpt5")
    prompt = method._first_prompt(0, TaskCard.of(make_task("task")))
    names = ["soup", "good bread and cold soup", "blue river", "soup"]
    together = method._write(names, prompt, seed=1, do_sample=False)
    assert together == [method._write([n], prompt, seed=1, do_sample=False)[0] for n in names]
    assert len(set(together)) == 3
    drawn = method._write(names, prompt, seed=1)
    assert drawn == method._write(names, prompt, seed=1)
    assert drawn[0] != drawn[3]
    assert method._write([], prompt, seed=1) == []


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_lfpt5_reads_back_what_it_wrote_for_each_task(kind: str, monkeypatch) -> None:
    """One writing for all earlier tasks; each gets its own samples of it."""
    method = method_for(make_backbone(kind), "lfpt5", pseudo_samples=2)
    tasks = [
        make_task("soup", ("negative", "positive")),
        make_task("a-very-long-name", ("sport", "world", "neutral")),
    ]
    state = method.start(0)
    for task in tasks:
        state = method.learn(state, task, task.split(4))
    calls, true = [], method.backbone.model.generate
    monkeypatch.setattr(
        method.backbone.model, "generate", lambda **given: calls.append(given) or true(**given)
    )
    assert method.pseudo_samples(state) == method.pseudo_samples(state)
    assert [len(call["inputs_embeds"]) for call in calls] == [10, 10]

    def write(names, *_):
        words = {"soup": "positive", "a-very-long-name": "world"}
        return [f"{name} {i} Answer: {words[name]}" for i, name in enumerate(names)]

    monkeypatch.setattr(method, "_write", write)
    rows = method.pseudo_samples(state)
    monkeypatch.setattr(lfpt5, "WRITTEN_AT_ONCE", 3)
    sizes = [len(own.texts) for own in method.pseudo_samples(state).values()]
    assert sizes == [4, 6]  # in four goes
    assert rows["soup"].texts == tuple(f"soup {i}" for i in range(4))
    assert rows["a-very-long-name"].texts == tuple(f"a-very-long-name {i}" for i in range(4, 10))
    for name, word in (("soup", "positive"), ("a-very-long-name", "world")):
        names = state.snapshots[name].card.label_names
        assert {names[label] for label in rows[name].labels} == {word}


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_a_prompt_after_the_text_stands_after_the_text(kind: str) -> None:
    """Against embeddings put together by hand, for texts of different lengths."""
    backbone = make_backbone(kind)
    method = method_for(backbone, "lfpt5")
    bank = torch.randn(3, backbone.embed_dim)
    tokens = backbone.tokenize(["good soup", "bad bread and cold soup"], 3)
    batch = method.view.assemble(method.view.prepare([Row(t, range(3)) for t in tokens]), bank)
    for i, each in enumerate(tokens):
        size = len(each.ids)
        expected = torch.cat([backbone.embed(torch.tensor(each.ids)), bank])
        torch.testing.assert_close(batch.inputs_embeds[i, : size + 3], expected)
        assert batch.is_filled[i].sum() == size + 3


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
