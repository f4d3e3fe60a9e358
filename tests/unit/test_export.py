"""Exports load in PEFT and give the same scores; what a format cannot hold is refused; imports come back."""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import BertForSequenceClassification

from qtuning import QTuner, cli, export_embeddings, export_peft, import_peft
from qtuning.backbones import Backbone
from qtuning.errors import ConfigError, ExportError, HubError, TaskError
from qtuning.export import export
from qtuning.hub import push_folder
from qtuning.tasks import Task
from tests.conftest import SMALL, make_backbone, make_model, make_task, make_tokenizer

THREE = ("how to", "report problem", "report status")
TEXTS = ["good soup", "river stone blue late early lost", "bad", "awful great poor nice a"]


def make_tuner(kind: str, **options: Any) -> QTuner:
    """Three tasks; the third has evicted. Label words of several tokens, some beginning alike."""
    backbone = make_backbone(kind, **options)
    tuner = QTuner(backbone, **{**SMALL, "queue_size": 2})
    for number in range(3):
        task = make_task(f"task{number}", THREE if number % 2 else ("negative", "positive"), 10)
        tuner.learn(task, progress=False)
    return tuner


def in_peft(backbone: Backbone, folder: Path, labels: int) -> Any:
    """The adapter on a copy of the model, as PEFT loads it."""
    peft = pytest.importorskip("peft")
    model = copy.deepcopy(backbone.model)
    if backbone.family == "encoder":
        config = copy.deepcopy(model.config)
        config.num_labels = labels
        classifier = BertForSequenceClassification(config)
        classifier.bert.load_state_dict(model.state_dict())
        model = classifier
    return peft.PeftModel.from_pretrained(model, folder).eval()


def scores_of(model: Any, about: dict[str, Any], tokenizer: Any, text: str) -> list[float]:
    """Label probabilities by plain calls of a model: nothing of ours but what task.json says."""
    family = about["backbone"]["family"]
    with torch.no_grad():
        if family == "encoder":
            inputs = tokenizer(text, return_tensors="pt")
            return model(**inputs).logits[0].softmax(-1).tolist()
        found = []
        ids = tokenizer(text)["input_ids"] + about["question_tokens"]
        for words in about["label_tokens"]:
            if family == "causal":
                logits = model(input_ids=torch.tensor([[*ids, *words]])).logits
                logits = logits[0, -len(words) - 1 : -1]
            else:
                written = torch.tensor([[model.config.decoder_start_token_id, *words[:-1]]])
                logits = model(input_ids=torch.tensor([ids]), decoder_input_ids=written).logits[0]
            found.append(logits.log_softmax(-1).gather(-1, torch.tensor(words)[:, None]).sum())
    return torch.stack(found).softmax(0).tolist()


@pytest.mark.parametrize("kind", ["t5", "bart", "gpt2", "llama", "opt"])
def test_peft_gives_the_same_scores(kind: str, tmp_path: Path) -> None:
    tuner = make_tuner(kind)
    for name in tuner.tasks:
        folder = export_peft(tuner, name, tmp_path / name)
        about = json.loads((folder / "task.json").read_text())
        model = in_peft(tuner.backbone, folder, 0)
        for text in TEXTS:
            found = scores_of(model, about, tuner.backbone.tokenizer, text)
            expected = tuner.predict_proba(text, name)
            assert about["labels"] == list(expected)
            assert found == pytest.approx(list(expected.values()), abs=1e-5)


def test_peft_gives_the_same_scores_for_a_bert_taught_in_its_layout(tmp_path: Path) -> None:
    tuner = make_tuner("bert", readout="peft")
    for name, card in tuner.tasks.items():
        folder = export_peft(tuner, name, tmp_path / name)
        about = json.loads((folder / "task.json").read_text())
        model = in_peft(tuner.backbone, folder, len(card.label_names))
        for text in TEXTS:
            found = scores_of(model, about, tuner.backbone.tokenizer, text)
            expected = list(tuner.predict_proba(text, name).values())
            assert found == pytest.approx(expected, abs=1e-5)


def test_the_layout_of_peft_is_kept_with_the_collection(tmp_path: Path) -> None:
    make_model("bert").save_pretrained(tmp_path / "model")
    make_tokenizer("bert").save_pretrained(tmp_path / "model")
    tuner = QTuner(str(tmp_path / "model"), device="cpu", readout="peft", **SMALL)
    tuner.learn(make_task("a", rows=10), progress=False)
    tuner.save_pretrained(tmp_path / "c")
    opened = QTuner.from_pretrained(tmp_path / "c", device="cpu")
    assert opened.backbone.readout == "peft"
    assert opened.predict_proba(TEXTS, "a") == tuner.predict_proba(TEXTS, "a")
    assert tuner.answer("good").task in ("a", None)
    export_peft(opened, "a", tmp_path / "adapter")


def test_the_usual_layout_of_an_encoder_is_refused_with_the_reason(tmp_path: Path) -> None:
    tuner = make_tuner("bert")
    says = r"before \[CLS\] and its classifier reads the first prompt vector.*usual layout.*readout='peft'"
    with pytest.raises(ExportError, match=says):
        export_peft(tuner, "task0", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("kind", ["gpt2", "t5", "bert"])
@pytest.mark.parametrize("is_pair", [False, True], ids=["single", "pair"])
def test_the_snippet_in_the_card_runs_and_gives_the_same_scores(
    kind: str, is_pair: bool, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    make_model(kind).save_pretrained(tmp_path / "model")
    make_tokenizer(kind).save_pretrained(tmp_path / "model")
    readout = {"readout": "peft"} if kind == "bert" else {}
    tuner = QTuner(str(tmp_path / "model"), device="cpu", **readout, **SMALL)
    task = make_task("a", THREE, rows=10)
    if is_pair:
        task = Task(
            "a", [(text, "late soup") for text in task.texts], task.labels, task.label_names
        )
    tuner.learn(task, progress=False)
    card = (export_peft(tuner, "a", tmp_path / "adapter") / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.S)
    assert "\n    \n" not in code
    space: dict[str, Any] = {}
    exec(code.replace("path/to/this/folder", str(tmp_path / "adapter")), space)
    text = ("good river", "cold") if is_pair else "good river"
    expected = tuner.predict_proba(text, "a")
    found = space["score"](*text) if is_pair else space["score"](text)
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-5)


def test_a_card_says_labels_scores_and_limits(tmp_path: Path) -> None:
    tuner = make_tuner("gpt2")
    card = (export_peft(tuner, "task1", tmp_path / "a") / "README.md").read_text()
    facts = tuner.state.snapshots["task1"].facts
    assert "base_model: tiny-gpt2\n" in card
    assert "| report problem | report problem | " in card
    assert f"| {facts['validation_score']:.3f} ({facts['split']['validation']} texts) |" in card
    for words in ("How to load it", "Limits", "few examples", tuner.backbone.fingerprint()):
        assert words in card
    header = ModelCard(card).data
    assert (header.library_name, header.base_model) == ("peft", "tiny-gpt2")
    export(tuner, None, tmp_path / "all")
    assert "| [task1](task1/README.md) | how to, report problem" in (
        tmp_path / "all" / "README.md"
    ).read_text(encoding="utf-8")


# ── embeddings ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_embeddings_used_as_they_say_give_the_same_scores(kind: str, tmp_path: Path) -> None:
    tuner = make_tuner(kind)
    folder = export_embeddings(tuner, "task1", tmp_path / "e")
    about = json.loads((folder / "task.json").read_text())
    rows = load_file(folder / "prompt.safetensors")["rows"]
    assert list(rows.shape) == about["prompt"]["shape"]
    model, table = tuner.backbone.model, tuner.backbone.model.get_input_embeddings()

    class Prompted:
        """A model that puts the rows before what it reads."""

        config = model.config

        def __call__(self, input_ids: torch.Tensor, **more: Any) -> Any:
            return model(inputs_embeds=torch.cat([rows, table(input_ids[0])])[None], **more)

    for text in TEXTS:
        found = scores_of(Prompted(), about, tuner.backbone.tokenizer, text)
        expected = list(tuner.predict_proba(text, "task1").values())
        if kind == "gpt2":
            assert any("prompt_embeds" in line for line in about["how"])
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("readout", ["mean", "cls", "peft"])
def test_embeddings_of_an_encoder_used_as_they_say(readout: str, tmp_path: Path) -> None:
    tuner = make_tuner("bert", readout=readout)
    folder = export_embeddings(tuner, "task1", tmp_path / "e")
    about = json.loads((folder / "task.json").read_text())
    kept = load_file(folder / "prompt.safetensors")
    assert set(kept) == {"rows", "head.weight", "head.bias"}
    model, before = tuner.backbone.model, about["prompt"]["tokens_before_it"]
    ids = torch.tensor(tuner.backbone.tokenizer("good soup")["input_ids"])
    words = model.get_input_embeddings()(ids)
    whole = torch.cat([words[:before], kept["rows"], words[before:]])[None]
    with torch.no_grad():
        out = model(inputs_embeds=whole)
        states, rows = out.last_hidden_state[0], len(kept["rows"])
        read = {
            "mean": torch.cat([states[:before], states[before + rows :]]).mean(0),
            "cls": states[0],
            "peft": out.pooler_output[0],
        }[readout]
        found = (kept["head.weight"] @ read + kept["head.bias"]).softmax(-1).tolist()
    expected = list(tuner.predict_proba("good soup", "task1").values())
    assert found == pytest.approx(expected, abs=1e-5)


# ── what cannot be exported ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "method", "says"),
    [
        ("gpt2", "zero-shot", "learns no prompt vectors"),
        ("bert", "linear-probe", "learns no prompt vectors"),
        ("gpt2", "prompt-tuning", "a prompt that goes on changing"),
        ("t5", "lfpt5", "a prompt that goes on changing"),
        ("bert", "per-task-finetune", "weights of its own"),
        ("bert", "mbpa++", "weights of its own"),
    ],
)
def test_what_is_not_one_prompt_is_refused(
    kind: str, method: str, says: str, tmp_path: Path
) -> None:
    tuner = QTuner(make_backbone(kind), method=method, **{**SMALL, "epochs": 1})
    tuner.learn(make_task("a", rows=10), progress=False)
    for to in ("peft", "embeddings"):
        with pytest.raises(
            ExportError, match=f"'a' cannot be exported: method '{re.escape(method)}'.*{says}"
        ):
            export(tuner, ["a"], tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    tuner = make_tuner("gpt2")
    (tmp_path / "README.md").write_text("mine")
    for tasks in (["task0"], None):
        with pytest.raises(ExportError, match="not an empty folder; choose another"):
            export(tuner, tasks, tmp_path)
    with pytest.raises(ExportError, match="not an empty folder"):
        export(tuner, None, tmp_path / "README.md")
    with pytest.raises(TaskError, match=r"'task9'\. Did you mean"):
        export_peft(tuner, "task9", tmp_path / "new")
    with pytest.raises(ConfigError, match=r"export format 'pef'\. Did you mean 'peft'"):
        export(tuner, None, tmp_path / "new", to="pef")
    with pytest.raises(ExportError, match="no tasks to export"):
        export(QTuner(make_backbone("gpt2"), **SMALL), None, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


# ── import ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["gpt2", "t5", "bert"])
def test_an_imported_export_gives_the_same_answers(kind: str, tmp_path: Path) -> None:
    options = {"readout": "peft"} if kind == "bert" else {}
    tuner = make_tuner(kind, **options)
    folder = export_peft(tuner, "task1", tmp_path / "adapter")
    other = QTuner(tuner.backbone, **SMALL)
    other.learn(make_task("first", rows=10), progress=False)
    queue = other.state.queue.rows.clone()
    other.add_prompt(import_peft(folder, tuner.backbone))
    other.add_prompt(import_peft(folder, tuner.backbone, name="again"), texts=TEXTS)
    expected = tuner.predict_proba(TEXTS, "task1")
    assert other.predict_proba(TEXTS, "task1") == other.predict_proba(TEXTS, "again") == expected
    assert torch.equal(other.state.queue.rows, queue)
    other.save_pretrained(tmp_path / "c")
    opened = QTuner.from_pretrained(tmp_path / "c", model=tuner.backbone)
    assert opened.predict_proba(TEXTS, "task1") == expected
    opened.learn(make_task("next", rows=10), progress=False)
    assert opened.predict_proba(TEXTS, "task1") == expected
    with pytest.raises(TaskError, match="task1 has no key"):
        opened.predict("good")
    with pytest.raises(TaskError, match=r"'task1' is already .*replace=True"):
        opened.add_prompt(import_peft(folder, tuner.backbone))
    opened.add_prompt(import_peft(folder, tuner.backbone), texts=TEXTS, replace=True)
    assert {found.task for found in opened.find_tasks(TEXTS)} <= set(opened.tasks)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "bert"])
def test_a_prompt_that_peft_made_is_imported(kind: str, tmp_path: Path) -> None:
    """Never seen by our export: PEFT makes it and saves it."""
    peft = pytest.importorskip("peft")
    backbone = make_backbone(kind, **({"readout": "peft"} if kind == "bert" else {}))
    task_type = {"gpt2": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bert": "SEQ_CLS"}[kind]
    config = peft.PromptTuningConfig(
        task_type=task_type, num_virtual_tokens=4, num_transformer_submodules=1
    )
    model = copy.deepcopy(backbone.model)
    if kind == "bert":
        whole = copy.deepcopy(model.config)
        whole.num_labels = 3
        model = BertForSequenceClassification(whole)
        model.bert.load_state_dict(backbone.model.state_dict())
    torch.manual_seed(0)
    trained = peft.get_peft_model(model, config).eval()
    trained.save_pretrained(tmp_path / "made")
    snapshot = import_peft(tmp_path / "made", backbone, name="made", label_names=THREE)
    tuner = QTuner(backbone, **SMALL)
    tuner.add_prompt(snapshot)
    about = json.loads((export_peft(tuner, "made", tmp_path / "x") / "task.json").read_text())
    for text in TEXTS:
        found = scores_of(trained, about, backbone.tokenizer, text)
        expected = list(tuner.predict_proba(text, "made").values())
        assert found == pytest.approx(expected, abs=1e-5)


def changed(file: str, **values: Any) -> Any:
    def change(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**found, **values}))

    return change


def cut_prompt(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["prompt_embeddings"] = tensors["prompt_embeddings"][:, :8].contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")


def without(file: str) -> Any:
    return lambda folder: (folder / file).unlink()


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "lora": (changed("adapter_config.json", peft_type="LORA"), {}, "type 'LORA'; only PROMPT_TUNING"),
    "task-type": (
        changed("adapter_config.json", task_type="CAUSAL_LM"),
        {},
        "task type 'CAUSAL_LM', and 'tiny-t5' .* needs 'SEQ_2_SEQ_LM'",
    ),
    "decoder-prompt": (
        changed("adapter_config.json", num_transformer_submodules=None),
        {},
        "prompt for the decoder too .*num_transformer_submodules=1",
    ),
    "fewer-rows": (changed("adapter_config.json", num_virtual_tokens=99), {}, r"shape .* ask for \(99, 32\)"),
    "narrow": (cut_prompt, {}, r"shape \(\d, 8\).*take the model it was trained on"),
    "no-config": (without("adapter_config.json"), {}, "there is no .*adapter_config.json.*Check the path"),
    "no-tensors": (without("adapter_model.safetensors"), {}, "pickles, which are not read"),
    "no-labels": (without("task.json"), {}, "does not say its labels.*give label_names"),
    "one-label": (None, {"label_names": ["x"]}, "at least two different labels"),
    "twice": (None, {"label_names": ["x", "x"]}, "at least two different labels"),
    "name": (None, {"name": "a/b"}, "got 'a/b'. Rename"),
    "words": (None, {"label_words": {"z": "y"}}, "'z', which is no label"),
    "damaged-config": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        {},
        "cannot be read .*restore",
    ),
    "damaged-tensors": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 20),
        {},
        "is damaged .*restore",
    ),
    "other-weights": (
        changed("task.json", backbone={"name": "big", "fingerprint": "0" * 32}),
        {},
        "made for 'big' .*has other weights",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Backbone, Path]:
    tuner = make_tuner("t5")
    return tuner.backbone, export_peft(tuner, "task0", tmp_path_factory.mktemp("e") / "adapter")


@pytest.mark.parametrize("case", list(BAD.values()), ids=list(BAD))
def test_a_bad_adapter_is_refused(case: Any, exported: Any, tmp_path: Path) -> None:
    change, options, says = case
    backbone, source = exported
    folder = tmp_path / "adapter"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if change:
        change(folder)
    with pytest.raises((ExportError, TaskError), match=says) as caught:
        import_peft(folder, backbone, **options)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_an_encoder_must_fit_layout_and_labels(tmp_path: Path) -> None:
    tuner = make_tuner("bert", readout="peft")
    folder = export_peft(tuner, "task0", tmp_path / "a")
    with pytest.raises(ExportError, match=r"reads 'mean'; load it with readout='peft'"):
        import_peft(folder, make_backbone("bert"))
    with pytest.raises(ExportError, match=r"3 labels .* need \(3, 32\)"):
        import_peft(folder, tuner.backbone, label_names=THREE)


def test_a_prompt_is_only_added_where_it_can_answer() -> None:
    snapshot = make_tuner("gpt2").state.snapshots["task0"]
    with pytest.raises(TaskError, match="another family than 'tiny-bert'"):
        QTuner(make_backbone("bert"), **SMALL).add_prompt(snapshot)
    short = replace(snapshot, rows=snapshot.rows[:, :24])
    with pytest.raises(TaskError, match="vectors of 24 numbers, and 'tiny-gpt2' needs 32"):
        QTuner(make_backbone("gpt2"), **SMALL).add_prompt(short)
    with pytest.raises(TaskError, match="'prompt-tuning' does not answer tasks by prompts"):
        QTuner(make_backbone("gpt2"), method="prompt-tuning", **SMALL).add_prompt(snapshot)


# ── the command ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A collection of two tasks on a model in a folder."""
    make_model("gpt2").save_pretrained(tmp_path / "model")
    make_tokenizer("gpt2").save_pretrained(tmp_path / "model")
    tuner = QTuner(str(tmp_path / "model"), device="cpu", **SMALL)
    for name in ("a", "b"):
        tuner.learn(make_task(name, rows=10), progress=False)
    tuner.save_pretrained(tmp_path / "c")
    return tmp_path / "c"


def run_command(monkeypatch: pytest.MonkeyPatch, *words: object) -> object:
    monkeypatch.setattr(sys, "argv", ["qtuning", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_the_command_writes_one_task_or_all_and_pushes_to_a_stand_in_for_the_hub(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, stand_in: Any
) -> None:
    one = ("export", saved, "--task", "a", "--to", "peft", "-o", tmp_path / "one")
    assert run_command(monkeypatch, *one) == 0
    assert (tmp_path / "one" / "adapter_config.json").exists()
    whole = ("export", saved, "--to", "embeddings", "-o", tmp_path / "all", "--push", "me/all")
    assert run_command(monkeypatch, *whole) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "wrote 1 task to" in said
    assert "wrote 2 tasks to" in said
    assert "uploaded to https://huggingface.co/me/all" in said
    each = ("README.md", "task.json", "prompt.safetensors")
    files = {f"{name}/{file}" for name in "ab" for file in each}
    assert set(stand_in[-1][1]["files"]) == {"README.md", *files}


# ── the hub ──────────────────────────────────────────────────────────────────────────────────


class StandIn:
    """Records what would go to the hub."""

    calls: list[tuple[str, dict[str, Any]]] = []

    def __init__(self, **options: Any):
        self.calls.append(("api", options))

    def create_repo(self, repo: str, **options: Any) -> Any:
        self.calls.append(("create_repo", {"repo": repo, **options}))
        address = SimpleNamespace(repo_id=repo)
        return type("Address", (str,), vars(address))(f"https://huggingface.co/{repo}")

    def upload_folder(self, **options: Any) -> None:
        folder = Path(options["folder_path"])
        files = {
            str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()
        }
        self.calls.append(("upload_folder", {**options, "files": files}))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    monkeypatch.setattr("huggingface_hub.HfApi", StandIn)
    monkeypatch.setattr(StandIn, "calls", [])
    return StandIn.calls


def test_pushing_a_collection_to_a_stand_in_for_the_hub(stand_in: Any, tmp_path: Path) -> None:
    tuner = make_tuner("bert")
    assert tuner.push_to_hub("me/tasks", private=True) == "https://huggingface.co/me/tasks"
    (_, created), (_, uploaded) = stand_in[1:]
    assert created == {"repo": "me/tasks", "private": True, "exist_ok": True}
    assert uploaded["repo_id"] == "me/tasks"
    assert uploaded["delete_patterns"] == ["tasks/*", "state-*.safetensors"]
    for file, data in uploaded["files"].items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(data)
    opened = QTuner.from_pretrained(tmp_path, model=tuner.backbone)
    assert opened.predict_proba(TEXTS, "task1") == tuner.predict_proba(TEXTS, "task1")
    card = uploaded["files"]["README.md"].decode()
    for words in ("task1", "report problem", "How to load it", "Limits", "base_model: tiny-bert"):
        assert words in card


def test_pushing_an_adapter_to_a_stand_in_for_the_hub(stand_in: Any, tmp_path: Path) -> None:
    folder = export_peft(make_tuner("gpt2"), "task0", tmp_path / "a")
    push_folder(folder, "me/adapter")
    uploaded = stand_in[-1][1]
    assert set(uploaded["files"]) == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "task.json",
    }
    assert uploaded["delete_patterns"] is None


def test_a_stand_in_for_a_hub_that_refuses(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nmore lines")

    monkeypatch.setattr(StandIn, "create_repo", refuse)
    with pytest.raises(HubError, match=r"'me/adapter': no route\. Log in") as caught:
        push_folder(tmp_path, "me/adapter")
    assert "\n" not in str(caught.value)
    for name in ("a/b/c", "", "me/bad name"):
        with pytest.raises(ConfigError, match="must be 'owner/name', got"):
            push_folder(tmp_path, name)
