"""Rows as parts of a line: the same numbers as padded rows, each prompt read once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Event

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qtuning import wrap_model
from qtuning.backbones import attend as attending
from qtuning.backbones import beside, causal
from qtuning.backbones.attend import attend, kernel_works
from qtuning.backbones.beside import Beside, attend_beside
from qtuning.backbones.causal import CausalBackbone
from qtuning.backbones.extents import CPU_UNIT, TILE, UNIT, Extent
from qtuning.backbones.lines import TAKES_LINES, Line
from qtuning.backbones.reading import Row, Tokens
from qtuning.config import make_settings
from qtuning.lanes import fit_lanes
from qtuning.pack import Pack
from qtuning.scoring import FEW_PATHS, FEW_ROWS, Quiz, batches_in_lines, read_all, read_in_lines
from qtuning.weights import trainable_copy
from tests.conftest import CONFIGS, SIZE, SMALL, VOCAB, make_backbone, make_tokenizer
from tests.unit.test_lanes import leaves, make_lanes, train_steps


@pytest.fixture
def llama():
    return make_backbone("llama", dtype=torch.float64)


@pytest.fixture
def in_lines(monkeypatch):
    """Lines on a CPU whatever else is so, as long as they are allowed."""
    monkeypatch.setattr(
        CausalBackbone, "reads_lines", property(lambda backbone: backbone.may_read_lines)
    )


def lined(backbone, rows, device="cpu"):
    return replace(backbone.prepare(rows), extent=Extent.of(rows, torch.device(device)))


PROMPT, OTHER = range(2), range(2, 5)
SINGLE = [
    Row(Tokens((5, 6, 7)), PROMPT, ((8,),)),
    Row(Tokens((4, 3)), PROMPT, ((2, 1),)),
    Row(Tokens((9,)), OTHER, ((),)),
    Row(Tokens((8, 8)), OTHER, ((),)),
]
BRANCHED = [
    Row(Tokens((5, 6, 7)), PROMPT, ((8,), (9, 10), ())),
    Row(Tokens((9,)), OTHER, ((),)),
    Row(Tokens((4, 3)), PROMPT, ((2, 1),)),
    Row(Tokens((6, 6)), (), ((3,), (4,))),
]


def seen_from(line) -> list[list[int]]:
    """Positions that each part sees, itself last."""
    edges, parts = line.starts.tolist(), []
    for i, others in enumerate(line.before.tolist()):
        seen = [part for part in (*others, i) if part >= 0] if edges[i] < edges[i + 1] else []
        parts.append([k for part in seen for k in range(edges[part], edges[part + 1])])
    return parts


def test_where_each_part_stands(llama) -> None:
    assert lined(llama, SINGLE).extent == Extent(CPU_UNIT, 5)
    reading = lined(llama, SINGLE, "cuda")
    assert reading.extent == Extent(UNIT, 5)
    line = Line.of(reading)
    assert line.starts.tolist() == [0, 2, 5, 9, 13, 14, 16]  # two prompts, four texts with a path
    assert line.place[:16].tolist() == [0, 1, 0, 1, 2, 2, 3, 4, 5, 2, 3, 4, 5, 3, 3, 4]
    assert seen_from(line) == [[0, 1], [2, 3, 4], [0, 1, 5, 6, 7, 8], [0, 1, 9, 10, 11, 12],
                               [2, 3, 4, 13], [2, 3, 4, 14, 15]]  # fmt: skip
    assert line.seen_by.tolist() == [[5, 13], [13, 16], *[[0, 0]] * 4]
    assert line.tiles[:6].tolist() == [[i, 0] for i in range(6)]
    assert line.tiles[6:, 0].tolist() == [-1]
    bank = torch.randn(5, llama.embed_dim, dtype=torch.float64)
    tokens = llama.embed(torch.tensor([5, 6, 7, 8, 4, 3, 2, 1, 9, 8, 8]))
    assert torch.equal(line.embed(reading, bank, llama)[:16], torch.cat([bank, tokens]))


def test_long_parts_have_several_tiles(llama) -> None:
    slots = range(2)
    line = Line.of(lined(llama, [Row(Tokens((1,) * n), slots) for n in (3, 2 * TILE + 1, TILE)]))
    found = [tile for tile in line.tiles.tolist() if tile[0] >= 0]
    assert found == [[0, 0], [1, 0], [2, 0], [2, TILE], [2, 2 * TILE], [3, 0]]


def test_every_path_of_several_sees_its_text(llama) -> None:
    line = Line.of(lined(llama, BRANCHED))
    text = [0, 1, 5, 6, 7]
    assert seen_from(line) == [[0, 1], [2, 3, 4], [], text, [2, 3, 4, 8], [0, 1, 9, 10], [11, 12], [*text, 13],
                     [*text, 14, 15], [], [], [0, 1, 9, 10, 16, 17], [11, 12, 18], [11, 12, 19]]  # fmt: skip


@pytest.mark.parametrize("rows", [SINGLE, BRANCHED], ids=["single", "branched"])
def test_read_outs_are_those_of_padded_rows(llama, rows) -> None:
    bank = torch.randn(5, llama.embed_dim, dtype=torch.float64)
    expected = llama.hidden(llama.prepare(rows), bank)
    assert torch.allclose(llama.hidden(lined(llama, rows), bank), expected, atol=1e-6)
    alone = [llama.hidden(llama.prepare([row]), bank) for row in rows]
    found = iter(llama.hidden(lined(llama, rows), bank))
    for own in alone:
        for path in own:
            assert torch.allclose(next(found)[: len(path)], path, atol=1e-6)


def make_kind(kind: str):
    """A tiny backbone of any kind that lines are used for."""
    if kind in CONFIGS:
        return make_backbone(kind)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    sizes = {**SIZE, "num_key_value_heads": 1, "head_dim": 16}
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, max_position_embeddings=128, **sizes, **tokens)  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return wrap_model(model.eval(), make_tokenizer("llama"), name=f"tiny-{kind}")


@pytest.mark.parametrize("kind", TAKES_LINES)
def test_every_kind_gives_the_numbers_of_padded_rows(kind: str) -> None:
    backbone = make_kind(kind)
    bank = torch.randn(5, backbone.embed_dim, generator=torch.Generator().manual_seed(0))
    for rows in (SINGLE, BRANCHED):
        expected = backbone.hidden(backbone.prepare(rows), bank)
        assert torch.allclose(backbone.hidden(lined(backbone, rows), bank), expected, atol=1e-4)
    assert backbone._reads_alike


@pytest.mark.parametrize("kind", ["gpt2", "llama", "opt"])
def test_models_are_tried_before_lines_are_used(kind: str, monkeypatch) -> None:

    def blind(starts, before, *rest):  # texts do not see their prompts
        return own(starts, torch.full_like(before, -1), *rest)

    own = Beside.of
    monkeypatch.setattr(Beside, "of", blind)
    assert not make_backbone(kind)._reads_alike
    monkeypatch.setattr(causal.Line, "of", lambda reading: 1 / 0)
    assert not make_backbone(kind)._reads_alike


def test_gradients_by_finite_differences(llama) -> None:
    """Two prompts, two texts each, shared heads: the operation against its own values."""
    line = Line.of(lined(llama, SINGLE))
    draw = torch.Generator().manual_seed(0)
    states = [
        torch.randn(16, heads, 3, dtype=torch.float64, generator=draw).requires_grad_()
        for heads in (4, 2, 2)
    ]
    where = (line.starts, line.before, line.seen_by, line.tiles)
    assert torch.autograd.gradcheck(
        lambda q, k, v: attend(q, k, v, *where, 0.5)[0], states, atol=1e-6
    )


@pytest.mark.parametrize("at_once", [1, 16, beside.KEYS_AT_ONCE])
@pytest.mark.parametrize("is_slow", [False, True], ids=["torch", "products"])
@pytest.mark.parametrize("rows", [SINGLE, BRANCHED], ids=["single", "branched"])
def test_attention_side_by_side_is_that_part_by_part(
    llama, rows, is_slow, at_once, monkeypatch
) -> None:
    """Values and gradients, by torch and by products, shared heads, whatever stands after the last part."""
    monkeypatch.setattr(beside, "has_slow_gradient", lambda query: is_slow)
    monkeypatch.setattr(beside, "KEYS_AT_ONCE", at_once)
    line = Line.of(lined(llama, rows))
    filled, positions = int(line.starts[-1]), len(line.part)
    draw = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, heads, positions, 3, dtype=torch.float64, generator=draw).requires_grad_()
        for heads in (4, 2, 2)
    ]
    where = (line.starts, line.before, line.seen_by, line.tiles)
    expected = attend(*(each[0].transpose(0, 1) for each in states), *where, 0.5)[0][:filled]
    found = attend_beside(None, *states, None, scaling=0.5, line=line.seen(torch.float64))[0][
        0, :filled
    ]
    assert torch.allclose(found, expected, atol=1e-12)
    toward = torch.randn(expected.shape, dtype=torch.float64, generator=draw)
    gradients = [torch.autograd.grad(each, states, toward) for each in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-12)
        assert not a[0, :, filled:].any()


def test_in_half_precision_gradients_of_attention_are_products(llama) -> None:
    """And near those in double precision."""
    line, draw = Line.of(lined(llama, SINGLE)), torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, heads, len(line.part), 8, generator=draw) for heads in (4, 2, 2)]
    found = {}
    for dtype in (torch.float64, torch.bfloat16):
        states = [each.to(dtype).requires_grad_() for each in drawn]
        assert beside.has_slow_gradient(states[0]) == (dtype == torch.bfloat16)
        assert not beside.has_slow_gradient(states[0].detach())
        out = attend_beside(None, *states, None, scaling=0.5, line=line.seen(dtype))[0]
        found[dtype] = [out, *torch.autograd.grad(out.square().sum(), states)]
    for exact, rounded in zip(*found.values(), strict=True):
        assert (rounded - exact).norm() < 0.02 * exact.norm()


def test_short_texts_are_not_padded_to_a_long_one(llama) -> None:
    """At most half of attention's queries, and of its keys, is padding: whatever the lengths of texts and prompts."""
    prompts, draw = [range(4), range(100)], np.random.default_rng(0)
    lengths = [*draw.integers(1, 9, 60).tolist(), 100, 60, 33]
    of = draw.integers(0, 2, len(lengths)).tolist()
    rows = [Row(Tokens((1,) * n), prompts[i]) for n, i in zip(lengths, of, strict=True)]
    kinds = Line.of(lined(llama, rows)).seen(torch.float64).kinds
    assert sum(kind.queries.numel() for kind in kinds) <= 2 * (sum(lengths) + 104)
    seen = 104 + sum(n + len(prompts[i]) for n, i in zip(lengths, of, strict=True))
    assert seen < sum(kind.keys.numel() for kind in kinds) <= 2 * seen


def test_keys_of_many_paths_are_gathered_a_few_at_a_time(llama, monkeypatch) -> None:
    """A path has the keys of its prompt and text for itself: they are as many more as there are paths."""
    rows = [Row(Tokens((1,) * 5), range(20), ((2,), (3, 4), (5, 6, 7)) * 20)] * 4
    monkeypatch.setattr(beside, "KEYS_AT_ONCE", 500)
    kinds = Line.of(lined(llama, rows)).seen(torch.float32).kinds
    assert sum(len(kind.keys) for kind in kinds) >= 4 * 60
    assert max(kind.keys.numel() for kind in kinds) <= 500


def test_several_paths_are_read_in_lines_where_that_is_cheap(llama, monkeypatch) -> None:
    many = [1] * FEW_ROWS
    assert read_in_lines(llama, [*many, FEW_PATHS]) == [*range(FEW_ROWS + 1)]
    assert read_in_lines(llama, [FEW_PATHS + 1, *many, 2]) == [*range(1, FEW_ROWS + 2)]
    assert read_in_lines(llama, many) == []  # as fast padded
    monkeypatch.setattr("qtuning.backbones.causal.TAKES_BRANCHES", ())
    few = [1, FEW_ROWS]  # else the text would be read again for every path
    assert read_in_lines(llama, few) == [0, 1]


def test_where_a_cpu_reads_lines() -> None:
    llama, untested = make_backbone("llama"), make_backbone("llama")
    assert llama.reads_lines
    llama.compile = "on"  # every line has sizes of its own
    assert not llama.reads_lines
    untested.model.config.model_type = "no-such-model"
    assert not untested.reads_lines
    assert not trainable_copy(make_backbone("llama")).reads_lines


@pytest.mark.parametrize(
    "extra", [{}, {"retention": "jsd"}, {"mlp": True, "mlp_hidden": 8}], ids=str
)
def test_lines_equal_padded_rows(llama, in_lines, extra: dict) -> None:
    """float64: 1e-6 after ten steps, because Llama's norm rounds to float32."""
    lined, padded = make_lanes(llama, **extra), make_lanes(llama, **extra)
    found = train_steps(llama, lined, 10)
    llama.may_read_lines = False
    expected = train_steps(llama, padded, 10)
    assert np.allclose(found, expected, atol=1e-6)
    for a, b in zip(lined, padded, strict=True):
        for x, y in zip(leaves(a), leaves(b), strict=True):
            assert (x - y).abs().max() < 1e-6


def test_what_follows_the_last_part_may_be_anything(llama, in_lines, monkeypatch) -> None:
    plain = train_steps(llama, make_lanes(llama), 4)
    own = Line.embed
    poisoned = []

    def poison(line, *given):
        embeds, last = own(line, *given), int(line.starts[-1])
        poisoned.append(len(embeds) - last)
        return torch.cat([embeds[:last], torch.full_like(embeds[last:], torch.nan)])

    monkeypatch.setattr(Line, "embed", poison)
    monkeypatch.setattr("qtuning.backbones.extents.CPU_UNIT", 97)
    assert train_steps(llama, make_lanes(llama), 4) == plain
    assert max(poisoned) > 0


def test_a_step_of_expected_rows_is_one_pass_with_room_for_each(
    llama, in_lines, monkeypatch
) -> None:
    monkeypatch.setattr("qtuning.backbones.extents.CPU_UNIT", 8)
    lanes = make_lanes(llama)
    pack = Pack(llama, lanes, make_settings(**{**SMALL, "batch_size": 4})[1])
    llama.is_captured = True
    draw = np.random.default_rng(0)
    ahead = [[draw.permutation(len(lane.train))[:4].tolist() for _ in range(10)] for lane in lanes]
    pack.expect(ahead)
    totals = []
    for batches in zip(*ahead, strict=True):
        step, [(rows, positions)] = pack.plan(batches, [1] * 6)
        assert positions in pack.lines
        whole = int(pack.lengths[step.rows.numpy()].sum())
        totals.append(whole - 3 * sum(pack.prompts))  # four rows of each prompt, which is read once
        assert totals[-1] <= positions
        assert rows == len(step.rows) == 4 * len(pack.prompts)
    assert max(totals) <= pack.lines[-1] < max(totals) + 8
    longest = [sorted(range(len(n.train)), key=lambda i: -len(n.train[i].ids))[:4] for n in lanes]
    [(_, more)] = pack.plan(longest, [1] * 6)[1]  # nobody expected that
    assert more > pack.lines[-1]


def test_scores_and_teachers_are_those_of_padded_rows(llama, in_lines, monkeypatch) -> None:
    monkeypatch.setattr("qtuning.scoring.CPU_TOKENS", 40)  # several lines
    answers = [llama.answers(["good", "bad"]), llama.answers(["very good indeed", "bad bad"])]
    draw = np.random.default_rng(0)
    tokens = [Tokens(tuple(draw.integers(3, 40, size=n))) for n in (3, 7, 2, 9, 4, 4, 12)]
    asked, slots = [0, 1, 0, 1, 1, 0, 0], [range(3), range(3, 8)]
    bank = torch.randn(8, llama.embed_dim, dtype=torch.float64)

    def found() -> tuple[torch.Tensor, torch.Tensor]:
        quiz = Quiz(llama, tokens, asked, slots, answers)
        rows = [Row(t, slots[i], ((5,),)) for t, i in zip(tokens, asked, strict=True)]
        return quiz.log_probs(bank, None), read_all(llama, rows, bank)

    lines = found()
    llama.may_read_lines = False
    for a, b in zip(lines, found(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_prompt_that_is_remembered_waits_for_a_line(llama, monkeypatch) -> None:
    """A line changes the model's attention for its pass: nobody else may read meanwhile."""
    prompt = torch.randn(3, llama.embed_dim)
    expected = llama.read_prompt(prompt)
    reading, bank = lined(llama, SINGLE), torch.randn(5, llama.embed_dim)
    is_reading, goes_on = Event(), Event()
    own = Line.embed

    def slow(line, *given):
        is_reading.set()
        assert goes_on.wait(timeout=60)
        return own(line, *given)

    monkeypatch.setattr(Line, "embed", slow)
    with ThreadPoolExecutor(2) as pool:
        line = pool.submit(llama.hidden, reading, bank)
        assert is_reading.wait(timeout=60)
        remembered = pool.submit(llama.read_prompt, prompt)
        assert wait([remembered], timeout=0.2).not_done
        goes_on.set()
        assert remembered.result().equal(expected)
        assert line.result().shape[0] == len(SINGLE)


def test_rows_of_one_prompt_share_lines(llama, monkeypatch) -> None:
    monkeypatch.setattr("qtuning.scoring.CPU_TOKENS", 12)
    slots = [range(4), range(4, 8)]
    rows = [Row(Tokens((1, 2, 3)), slots[i % 2]) for i in range(6)]
    batches = batches_in_lines(rows, llama)
    assert batches == [[0, 2], [4], [1, 3], [5]]
    assert (
        sum(Extent.of([rows[i] for i in batch], llama.device).prompted for batch in batches) == 16
    )


def test_when_lines_fail_rows_are_padded(llama, in_lines, monkeypatch) -> None:
    """In the middle of a task, after rows to validate were put into lines; batches of 3 leave short ones at the end."""
    settings = make_settings(**{**SMALL, "epochs": 3, "batch_size": 3, "validate_every": 1})[1]
    plain, broken = make_lanes(llama), make_lanes(llama)
    llama.may_read_lines = False
    expected = fit_lanes(llama, plain, settings)
    llama.may_read_lines = True
    own, calls = causal.Line.of, []

    def failing(reading):
        calls.append(torch.is_grad_enabled())
        return 1 / 0 if sum(calls) == 5 else own(reading)  # the fifth step

    monkeypatch.setattr(causal.Line, "of", failing)
    with pytest.warns(
        UserWarning, match="cannot read rows without padding here .ZeroDivisionError"
    ):
        found = fit_lanes(llama, broken, settings)
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    assert not llama.may_read_lines
    assert (sum(calls), calls[-1]) == (5, True)
    assert not all(calls)  # something was validated in lines before


def test_when_compiled_lines_fail_compiling_is_blamed_first(llama, in_lines, monkeypatch) -> None:
    settings = make_settings(**{**SMALL, "epochs": 1})[1]
    llama.compile, llama.is_compiled = "on", True
    compiled = Pack.compute
    monkeypatch.setattr(
        Pack, "compute", lambda p, *a: 1 / 0 if p.backbone.is_compiled else compiled(p, *a)
    )
    with pytest.warns(UserWarning, match="cannot be compiled here"):
        fit_lanes(llama, make_lanes(llama), settings)
    assert llama.may_read_lines
    assert not llama.is_compiled


def test_when_lines_fail_in_scoring_rows_are_padded(llama, in_lines, monkeypatch) -> None:
    bank = torch.randn(5, llama.embed_dim, dtype=torch.float64)
    expected = llama.hidden(llama.prepare(BRANCHED), bank)
    monkeypatch.setattr(causal.Line, "of", lambda reading: 1 / 0)
    with torch.no_grad(), pytest.warns(UserWarning, match="reads padded rows from now on"):
        found = llama.hidden(lined(llama, BRANCHED), bank)
    assert torch.equal(found, expected)
    assert not llama.reads_lines


def test_steps_that_nobody_expected_have_one_size(llama, in_lines) -> None:
    pack = Pack(llama, make_lanes(llama), make_settings(**{**SMALL, "batch_size": 4})[1])
    llama.is_captured = True
    draw = np.random.default_rng(0)
    sizes = set()
    for _ in range(20):
        batches = [draw.permutation(len(lane.train))[:4].tolist() for lane in pack.lanes]
        [(_, positions)] = pack.plan(batches, [1] * 6)[1]
        sizes.add(positions)
    assert sizes == {pack.longest_line}


def test_the_operation_is_one(llama) -> None:
    """What compiling is told of its results, and its gradient's registration, against what it does."""
    line = Line.of(lined(llama, SINGLE))
    draw = torch.Generator().manual_seed(0)
    states = [
        torch.randn(heads, 64, 4, generator=draw).transpose(0, 1).requires_grad_()
        for heads in (4, 2, 2)
    ]
    where = (line.starts, line.before, line.seen_by, line.tiles)
    torch.library.opcheck(attend, (*states, *where, 0.5), test_utils=("test_schema", "test_faketensor"))  # fmt: skip


def test_padded_rows_where_there_is_no_kernel(untried) -> None:
    with pytest.warns(UserWarning, match="no kernels for lines on meta"):
        assert not kernel_works(torch.device("meta"), torch.bfloat16, 4, 2, 8)


@pytest.fixture
def untried():
    """Kernels are tried anew, before and after."""
    kernel_works.cache_clear()
    yield
    kernel_works.cache_clear()


def test_a_kernel_that_mixes_rows_is_not_used(untried, monkeypatch) -> None:
    own, calls = attending._part_by_part, []

    def mixing(query, key, value, starts, before, scale):
        calls.append(1)
        if len(calls) == 1:  # "there"
            before = torch.tensor([[-1, -1], [0, -1], [0, 1]], dtype=torch.int32)
        return own(query, key, value, starts, before, scale)

    monkeypatch.setattr(attending, "_part_by_part", mixing)
    assert not kernel_works(torch.device("cpu"), torch.float32, 4, 2, 8)
