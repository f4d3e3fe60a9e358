"""Attention with a gradient made of products: torch's values and gradients, and where it is used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from qtuning.backbones import products
from qtuning.backbones.base import MASKED, TAKES_READY_MASK
from qtuning.backbones.products import ByProducts, attend_quickly, has_slow_gradient
from qtuning.backbones.reading import Row
from qtuning.weights import trainable_copy
from tests.conftest import TOPICS, make_backbone

ENCODERS = ("bert", "roberta", "distilbert", "electra")


def draw_states(heads: tuple[int, int, int], dtype=torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, n, 5, 8, dtype=torch.float64, generator=draw).to(dtype).requires_grad_()
        for n in heads
    ]


def some_hidden() -> torch.Tensor:
    """[2, 1, 5, 5] to be added: the last positions of each row are not seen."""
    hidden = torch.zeros(2, 1, 1, 5, dtype=torch.float64)
    hidden[0, ..., 3:] = hidden[1, ..., 4:] = MASKED
    return hidden.expand(-1, 1, 5, -1)


@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 2)], ids=["own", "shared"])
@pytest.mark.parametrize("is_masked", [False, True], ids=["causal", "masked"])
def test_values_and_gradients_are_those_of_torch(heads, is_masked, monkeypatch) -> None:
    """By a layer's call, as `transformers` answers it; and by finite differences."""
    monkeypatch.setattr(products, "has_slow_gradient", lambda query: True)
    layer = SimpleNamespace(is_causal=not is_masked, num_key_value_groups=heads[0] // heads[1])
    mask, states = some_hidden() if is_masked else None, draw_states(heads)
    found = attend_quickly(layer, *states, mask, scaling=0.5)[0]
    expected = sdpa_attention_forward(layer, *states, mask, scaling=0.5)[0]
    assert "ByProducts" in found.grad_fn.next_functions[0][0].next_functions[0][0].name()
    assert torch.allclose(found, expected, atol=1e-12)
    toward = torch.randn(expected.shape, dtype=torch.float64)
    gradients = [torch.autograd.grad(each, states, toward) for each in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    assert torch.autograd.gradcheck(lambda q, k, v: ByProducts.apply(q, k, v, mask, 0.5), states)


@pytest.mark.parametrize(
    "given",
    [
        {"dropout": 0.5},
        {"position_bias": torch.zeros(1, 4, 5, 5, dtype=torch.bfloat16)},
        {"is_causal": False},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_it_does_not_know_is_left_to_torch(given, monkeypatch) -> None:
    monkeypatch.setattr(ByProducts, "apply", lambda *_: pytest.fail("not for this"))
    states = draw_states((4, 4, 4), torch.bfloat16)
    assert has_slow_gradient(states[0])
    layer = SimpleNamespace(is_causal=True)
    found = attend_quickly(layer, *states, None, scaling=0.5, **given)[0]
    assert found.shape == (2, 5, 4, 8)


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("kind", [*ENCODERS, "gpt2", "llama", "opt"])
def test_padded_rows_in_half_precision_are_trained_by_it(kind, is_trained, monkeypatch) -> None:
    """A frozen model, and weights in training: no further from single precision than torch's own gradient."""
    taken, apply = [], ByProducts.apply
    monkeypatch.setattr(ByProducts, "apply", lambda *given: taken.append(1) or apply(*given))

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        taken.clear()
        backbone = make_backbone(kind, dtype=dtype)
        reader = trainable_copy(backbone) if is_trained else backbone
        draw = torch.Generator().manual_seed(0)
        prompt = torch.randn(3, reader.embed_dim, generator=draw).requires_grad_()
        texts = [" ".join(TOPICS[:n]) for n in (2, 7, 4)]
        reading = reader.prepare([Row(each, range(3)) for each in reader.tokenize(texts, 3)])
        with torch.no_grad():
            reader.hidden(reading, prompt)
        assert not taken  # scoring needs no gradient
        reader.hidden(reading, prompt)[..., :5].square().sum().backward()
        assert reader.model.config._attn_implementation == "sdpa"
        return prompt.grad

    exact = gradient(torch.float32)
    assert not taken
    ours = gradient(torch.bfloat16)
    assert len(taken) == make_backbone(kind).model.config.num_hidden_layers
    monkeypatch.setattr(products, "has_slow_gradient", lambda query: False)
    theirs = gradient(torch.bfloat16)
    assert not taken
    assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()


def test_a_model_that_makes_its_own_mask_keeps_its_attention(monkeypatch) -> None:
    """Under another attention it would make none, and padding would be seen."""
    backbone = make_backbone("bert", dtype=torch.bfloat16)
    assert "bert" in TAKES_READY_MASK
    monkeypatch.setattr(type(backbone), "takes_ready_mask", False)
    monkeypatch.setattr(backbone, "attending", lambda name: pytest.fail("not for this"))
    rows = [Row(each) for each in backbone.tokenize(["good", "good bad fine awful"], 0)]
    bank = torch.zeros(0, backbone.embed_dim)
    apart = [backbone.hidden(backbone.prepare([row]), bank) for row in rows]
    together = backbone.hidden(backbone.prepare(rows), bank)
    assert torch.allclose(together, torch.cat(apart), atol=0.05)
