"""The kernels against attention part by part: on a card, or in Triton's interpreter (`make test-kernels`)."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from qtuning.backbones.attend import _back_part_by_part, _part_by_part
from qtuning.backbones.extents import Extent
from qtuning.backbones.lines import Line
from qtuning.backbones.reading import Row, Tokens
from tests.conftest import make_backbone
from tests.unit.test_lines import BRANCHED, lined

can_run = torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ
needs = pytest.mark.skipif(
    find_spec("triton") is None or not can_run, reason="needs Triton, and a card or its interpreter"
)
pytestmark = [needs, *([pytest.mark.gpu] if torch.cuda.is_available() else [])]
PROMPTS = range(70), range(70, 75)
LONG = [Row(Tokens((1,) * n), PROMPTS[i]) for i, n in ((0, 3), (0, 130), (1, 64), (1, 1))]


@pytest.mark.parametrize("rows", [LONG, BRANCHED], ids=["long", "branched"])
def test_kernels_against_parts(rows) -> None:
    from qtuning.backbones import tree_kernel as kernel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    line = Line.of(lined(make_backbone("llama"), rows, "cuda"))  # as long as on a card
    draw = torch.Generator().manual_seed(0)
    size = Extent.of(rows, torch.device("cuda")).positions
    query, key, value, gradient = (
        torch.randn(heads, size, 16, generator=draw).transpose(0, 1) for heads in (6, 2, 2, 6)
    )  # strides as a model has them
    filled = int(line.starts[-1])
    expected = _part_by_part(query, key, value, line.starts, line.before, 0.3)
    states = [each.to(device) for each in (query, key, value)]
    starts, before, seen_by, tiles = (
        each.to(device) for each in (line.starts, line.before, line.seen_by, line.tiles)
    )
    out, sums = kernel.forward(*states, starts, before, tiles, 0.3)
    assert torch.allclose(out.cpu()[:filled], expected[:filled], atol=1e-5)
    back = _back_part_by_part(gradient, query, key, value, line.starts, line.before, 0.3)
    found = kernel.backward(gradient.to(device), *states, out, sums, starts, before, seen_by, tiles, 0.3)  # fmt: skip
    assert torch.allclose(found[0].cpu()[:filled], back[0][:filled], atol=1e-5)
    if rows is LONG:  # keys are given back in training, where texts have one path
        for a, b in zip(found[1:], back[1:], strict=True):
            assert torch.allclose(a.cpu()[:filled], b[:filled], atol=1e-4)
