"""What must also hold on a CUDA card; `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

from qtuning import QTuner, wrap_model
from qtuning.backbones import weights_sha256
from qtuning.config import make_settings
from qtuning.graphs import repeat
from qtuning.lanes import lanes_that_fit
from qtuning.methods import make_method
from qtuning.tasks import Rows
from qtuning.weights import make_examples, make_head, taking_steps, trainable_copy
from tests.conftest import SMALL, make_model, make_task, make_tokenizer
from tests.unit.test_lanes import leaves, make_lanes, train_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
]


def on_card(kind: str, dtype: torch.dtype):
    return wrap_model(
        make_model(kind, dtype=dtype).cuda(), make_tokenizer(kind), name=f"tiny-{kind}"
    )


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5", "bart"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_learning_on_the_card(kind: str, dtype: torch.dtype, tmp_path) -> None:
    backbone = on_card(kind, dtype)
    before = weights_sha256(backbone)
    tuner = QTuner(backbone, mlp=True, mlp_hidden=8, retention="jsd", **SMALL)
    for number in range(5):  # two of them evict, with retention
        tuner.learn(make_task(f"task{number}", rows=10, seed=number), progress=False)
    assert weights_sha256(backbone) == before
    tuner.save_pretrained(tmp_path / "c")
    loaded = QTuner.from_pretrained(tmp_path / "c", model=backbone)
    texts, tasks = ["good soup", "bad"], ["task0", "task4"]
    assert loaded.predict_proba(texts, tasks) == tuner.predict_proba(texts, tasks)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5"])
def test_packed_equals_alone_on_the_card(kind: str) -> None:
    backbone = on_card(kind, torch.float64)
    packed, alone = make_lanes(backbone), make_lanes(backbone)
    train_steps(backbone, packed, 20)
    for lane in alone:
        train_steps(backbone, [lane], 20)
    for together, single in zip(packed, alone, strict=True):
        for a, b in zip(leaves(together), leaves(single), strict=True):
            assert (a - b).abs().max() < 1e-8  # kernels differ by shape on a card


@pytest.mark.parametrize("way", ["captured", "compiled"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5", "bart"])
def test_captured_and_compiled_equal_eager(kind: str, way: str) -> None:
    """float64: 1e-8 after ten steps, most of them replays; bfloat16 is compared by its loss below.

    Llama 1e-6: its norm rounds to float32, compiled or not.
    """
    backbone = on_card(kind, torch.float64)
    eager, fast = make_lanes(backbone), make_lanes(backbone)
    train_steps(backbone, eager, 10)
    backbone.is_captured, backbone.is_compiled = True, way == "compiled"
    train_steps(backbone, fast, 10)
    for a, b in zip(eager, fast, strict=True):
        for x, y in zip(leaves(a), leaves(b), strict=True):
            assert (x - y).abs().max() < (1e-6 if kind == "llama" else 1e-8)


@pytest.mark.parametrize("kind", ["bert", "llama", "t5"])
def test_losses_in_bfloat16_agree_to_two_digits(kind: str) -> None:
    backbone = on_card(kind, torch.bfloat16)
    eager = train_steps(backbone, make_lanes(backbone), 5)
    backbone.is_captured = backbone.is_compiled = True
    fast = train_steps(backbone, make_lanes(backbone), 5)
    for a, b in zip(eager, fast, strict=True):
        assert a == pytest.approx(b, rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("way", ["recorded", "compiled"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5"])
def test_gradients_of_weights_in_half_precision_as_eager(kind: str, way: str) -> None:
    """Weights float32, products bfloat16: losses to two digits, gradients to a twentieth of their length."""
    backbone = on_card(kind, torch.bfloat16)
    backbone.compile = "dynamic"
    worker = trainable_copy(backbone)
    task = make_task("task", rows=16)
    labels = [task.label_names.index(label) for label in task.labels]
    head = make_head(worker, 2, torch.Generator().manual_seed(0))
    examples = make_examples(worker, task, Rows(task.texts, labels), head)
    weights = list(worker.model.parameters())

    def found(batch: range, steps=taking_steps) -> tuple[torch.Tensor, torch.Tensor]:
        with steps(worker):
            loss = examples.loss(batch)
        own = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        return loss.detach(), torch.cat([each.reshape(-1) for each in own])

    batches = [range(i, i + 6) for i in (0, 7, 13)]  # of several lengths
    eager = [found(batch, lambda worker: worker.training_layers()) for batch in batches]
    worker.is_compiled = way == "compiled"
    for _ in range(3):  # as it is, recorded, replayed
        for (loss, own), batch in zip(eager, batches, strict=True):
            again, fast = found(batch)
            assert again.item() == pytest.approx(loss.item(), rel=2e-2)
            assert (own - fast).norm() < 0.05 * own.norm()
    assert bool(worker.recorded._passes) == (kind != "t5")


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, "continual-finetune") for kind in ("gpt2", "llama")]
    + [("bert", n) for n in ("a-gem", "ewc", "multi-task", "replay", "idbr", "mbpa++")],
)
def test_weights_are_trained_recorded_as_eager(kind: str, name: str) -> None:
    """float64: 1e-8, Llama 1e-6; without compiling, which is compared above."""
    tasks = [make_task(f"task{i}", rows=8, seed=i) for i in range(3)]
    found = []
    for is_recorded in (False, True):
        backbone = on_card(kind, torch.float64)
        backbone.compile = "auto" if is_recorded else "off"
        own = {**SMALL, "weights_lr": 1e-3, "epochs": 4, "replay_every": 1}
        method = make_method(name, backbone, *make_settings(**own))
        state = method.start(0)
        for task in tasks:
            state = method.learn(state, task, task.split(4))
        recorded = method.worker.recorded
        assert recorded._passes if is_recorded else recorded is None
        found.append(state.weights)
    for n, weight in found[0].items():
        if not n.endswith("key.bias"):  # whose gradient is 0 but for rounding
            close = 1e-6 if kind == "llama" else 1e-8
            torch.testing.assert_close(found[1][n], weight, rtol=0, atol=close)


def test_lanes_are_chosen_from_free_memory() -> None:
    backbone = on_card("bert", torch.float32)
    lanes = make_lanes(backbone)
    settings = make_settings(**SMALL)[1]
    assert lanes_that_fit(backbone, lanes, [settings] * len(lanes)) == len(
        lanes
    )  # tiny ones all fit


def test_a_repeated_step_is_the_step_taken_as_often() -> None:
    """MBPA++'s local adaptation: the first step as it is, the others as replays of one graph."""
    weights = [torch.ones(8, 8, device="cuda").requires_grad_() for _ in range(2)]
    text = torch.randn(4, 8, device="cuda")

    def step(own: torch.Tensor) -> None:
        (gradient,) = torch.autograd.grad((text @ own).square().mean(), own)
        with torch.no_grad():
            own.add_(gradient, alpha=-0.01)

    repeat(lambda: step(weights[0]), 30, torch.device("cuda"))
    for _ in range(30):
        step(weights[1])
    assert torch.equal(*weights)
    assert (weights[0] - 1).abs().max() > 0.01


@pytest.mark.parametrize("way", ["eager", "captured", "compiled"])
def test_rows_without_padding_are_those_with_padding(way: str) -> None:
    """bfloat16: the first losses to two digits, and nothing is seen of the row before."""
    backbone = on_card("llama", torch.bfloat16)
    assert backbone.reads_lines
    backbone.is_captured, backbone.is_compiled = way != "eager", way == "compiled"
    lined = train_steps(backbone, make_lanes(backbone, retention="jsd"), 5)
    assert backbone.reads_lines
    backbone.may_read_lines = False
    padded = train_steps(backbone, make_lanes(backbone, retention="jsd"), 5)
    for a, b in zip(lined, padded, strict=True):
        assert a == pytest.approx(b, rel=2e-2, abs=2e-2)
