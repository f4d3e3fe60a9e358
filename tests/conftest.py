"""Tiny random models of every architecture, built from config: no download, no weights."""

from __future__ import annotations

import gc
import string
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    T5Config,
)
from transformers.models.t5.modeling_t5 import T5LayerNorm

from qtuning.backbones import Backbone, wrap_model
from qtuning.tasks import Task


def pytest_collection_finish() -> None:
    """What was imported stays: every run looks for live tensors among all objects, and these are a million."""
    gc.collect()
    gc.freeze()


TOPICS = ["good", "bad", "fine", "awful", "great", "poor", "nice", "cold", "warm", "slow", "fast"]
THINGS = [
    "soup",
    "bread",
    "river",
    "stone",
    "blue",
    "green",
    "red",
    "late",
    "early",
    "lost",
    "found",
]
OTHERS = ["money", "card", "parcel", "yes", "no", "maybe", "left", "right", "up", "down"]
ANSWERS = [
    "negative",
    "positive",
    "neutral",
    "Answer",
    ":",
    "report",
    "problem",
    "how",
    "to",
    "status",
]
WORDS = [*TOPICS, *THINGS, *OTHERS, *ANSWERS, "world", "sport", "business", "science"]
SPECIAL = ["<pad>", "<s>", "</s>", "[CLS]", "[SEP]", "<unk>"]


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A word tokenizer that closes texts the way the family's real ones do."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *WORDS, *string.ascii_lowercase])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([])
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    extra: dict[str, object] = {}
    if kind in ("bert", "electra", "distilbert", "roberta"):
        core.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
        )
        extra = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
        types = kind in ("bert", "electra")
        names = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
        extra["model_input_names"] = names
    elif kind == "t5":
        core.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", vocab["</s>"])]
        )
    elif kind == "bart":
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> $B </s>",
            special_tokens=[("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        **extra,
    )


VOCAB = len(SPECIAL) + len(WORDS) + 26
SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
CONFIGS = {
    "bert": lambda: BertConfig(vocab_size=VOCAB, max_position_embeddings=128, **SIZE),
    "roberta": lambda: RobertaConfig(
        vocab_size=VOCAB, max_position_embeddings=130, pad_token_id=0, type_vocab_size=1, **SIZE
    ),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=VOCAB, dim=32, n_layers=2, n_heads=2, hidden_dim=48, max_position_embeddings=128
    ),
    "electra": lambda: ElectraConfig(
        vocab_size=VOCAB, embedding_size=24, max_position_embeddings=128, **SIZE
    ),
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=128),
    "llama": lambda: LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=128, num_key_value_heads=1, **SIZE
    ),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        word_embed_proj_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=48,
        max_position_embeddings=128,
    ),
    "t5": lambda: T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
    ),
    "bart": lambda: BartConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        scale_embedding=True,
    ),
}
FAMILY_OF = {
    **dict.fromkeys(("bert", "roberta", "distilbert", "electra"), "encoder"),
    **dict.fromkeys(("gpt2", "llama", "opt"), "causal"),
    **dict.fromkeys(("t5", "bart"), "seq2seq"),
}
AUTO = {"encoder": AutoModel, "causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}


def make_model(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A random model whose weights are large enough for prompts to matter."""
    torch.manual_seed(seed)
    model = AUTO[FAMILY_OF[kind]].from_config(CONFIGS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    if dtype == torch.float64:
        for module in model.modules():
            if isinstance(module, T5LayerNorm):
                module.forward = partial(exact_norm, module)
    return model.to(dtype).eval()


def exact_norm(module: T5LayerNorm, states: torch.Tensor) -> torch.Tensor:
    """T5's norm in float64; transformers squares in float32 whatever it is given."""
    spread = torch.rsqrt(states.square().mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * (states * spread)


def make_backbone(
    kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: object
) -> Backbone:
    return wrap_model(
        make_model(kind, seed, dtype), make_tokenizer(kind), name=f"tiny-{kind}", **options
    )


def make_task(
    name: str, labels: tuple[str, ...] = ("negative", "positive"), rows: int = 16, seed: int = 0
) -> Task:
    """A learnable task of random words, each class with words of its own."""
    generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    texts, gold = [], []
    for i in range(rows * len(labels)):
        label = i % len(labels)
        own = WORDS[5 * label : 5 * label + 5]
        drawn = [own[int(torch.randint(5, (1,), generator=generator))] for _ in range(2)]
        length = int(torch.randint(2, 9, (1,), generator=generator))
        noise = [
            WORDS[20 + int(torch.randint(12, (1,), generator=generator))] for _ in range(length)
        ]
        texts.append(" ".join([*noise, *drawn, string.ascii_lowercase[i % 26]]))
        gold.append(labels[label])
    return Task(name, texts, gold)


@pytest.fixture(params=["bert", "gpt2", "t5"], ids=["encoder", "causal", "seq2seq"])
def family_backbone(request: pytest.FixtureRequest) -> Backbone:
    """One tiny backbone of each family, float32."""
    return make_backbone(request.param)


@pytest.fixture(params=["bert", "gpt2", "t5"], ids=["encoder", "causal", "seq2seq"])
def exact_backbone(request: pytest.FixtureRequest) -> Backbone:
    """One tiny backbone of each family, float64."""
    return make_backbone(request.param, dtype=torch.float64)


@pytest.fixture
def bert() -> Backbone:
    return make_backbone("bert")


SMALL = {
    "prompt_length": 2,
    "shared_length": 2,
    "queue_size": 3,
    "epochs": 2,
    "batch_size": 4,
    "shots": 4,
    "local_steps": 5,
}
"""Settings that make a tiny run quick; the queue is full after three tasks."""
