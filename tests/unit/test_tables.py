"""The paper's tables as sweeps: names that exist, a plan that adds up, and the recipe run on tiny weights."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qtuning.cli import main
from qtuning.streams import get_stream, list_tasks
from qtuning.tuning import BUDGET
from tests.conftest import THINGS, TOPICS, make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "tables").glob("*.yaml"))


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "perf"))
    return importlib.import_module("plan")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["qtuning", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), " ".join((said.out + said.err).split())

    return run


@pytest.mark.parametrize("file", TABLES, ids=lambda f: f.stem)
def test_every_table_is_a_sweep(file: Path, command: Any, planner: ModuleType) -> None:
    packs = planner.read_packs(file)
    assert {pack.seeds for pack in packs} <= {(0, 1, 2), (0, 1, 2, 3, 4, 5)}
    assert f"qtuning sweep tables/{file.name} --data DIR" in file.read_text()
    code, said = command("validate", str(file))
    assert code == 0, said
    assert f"{sum(len(pack.seeds) for pack in packs)} runs" in said
    code, said = command("sweep", str(file), "--dry-run")
    assert code == 0, said
    assert f"{sum(len(pack.seeds) for pack in packs)} runs" in said


@pytest.mark.parametrize(
    "file", sorted((ROOT / "tables" / "tuning").glob("*.yaml")), ids=lambda f: f.stem
)
def test_candidates_are_as_many_for_every_method_and_look_at_no_reported_row(
    file: Path, planner: ModuleType
) -> None:
    packs = planner.read_packs(file)
    assert f"qtuning sweep tables/tuning/{file.name} --data DIR" in file.read_text()
    assert {get_stream(pack.config.stream).protocol for pack in packs} == {"tuning"}
    assert set(Counter(pack.config.method for pack in packs).values()) == {BUDGET}


def test_presets_fit_the_streams(planner: ModuleType) -> None:
    """Short settings on short orders, long ones on the others, with the paper's shots and queue."""
    kinds = {**dict.fromkeys(range(1, 8), "short"), **dict.fromkeys(range(8, 14), "long")}
    for file in TABLES:
        for pack in planner.read_packs(file):
            config, order = pack.config, int(pack.config.stream.removeprefix("order-"))
            if file.name.startswith("paper-"):
                kind = kinds[order]
                model = {"t5-large": "t5-large", "bert-base-uncased": "bert-base"}[config.model]
                assert config.preset.startswith(f"{model}-{kind}-"), (file.name, pack.name)
                assert config.settings["shots"] == int(config.preset.rsplit("-", 1)[1])
                if not {"queue_size", "eviction"} & pack.varied.keys():
                    assert config.settings["queue_size"] == {"short": 5, "long": 10}[kind]
            elif file.name.startswith("shots"):
                assert config.settings["shots"] in (200, 1000)
            else:
                assert config.settings["shots"] == (16 if kinds[order] == "short" else 20)


# ── the plan ─────────────────────────────────────────────────────────────────────────────────


def test_the_plans_arithmetic(planner: ModuleType) -> None:
    """ProgPrompt on order 1 with T5-large, by hand: 14, 5, 10 and 4 classes, 300 epochs of 16 per class."""
    file = ROOT / "tables" / "paper-t5-large.yaml"
    (pack,) = [
        p for p in planner.read_packs(file)
        if (p.config.stream, p.config.method) == ("order-01", "prog-prompt")
    ]  # fmt: skip
    assert get_stream("order-01").tasks == ("dbpedia", "amazon", "yahoo", "agnews")
    record = json.loads((ROOT / "perf/results/speed-t5-large-gpu.json").read_text())["results"]
    packed, alone = (record[f"ours {k}, compiled"]["ms"] for k in ("packed 48", "alone"))
    short, long = (record[f"ours row{k}"]["ms"] for k in ("", ", long answer"))
    steps = [28 * 300, 10 * 300, 20 * 300, 8 * 300]
    classes = [
        14,
        5,
        10,
        4,
    ]  # 250 validation rows per class each epoch, 250 test rows twice, 64 per inner cell
    rows = [c * 250 * 302 + 64 * i for i, c in enumerate(classes, start=1)]
    longest = [10 + 162, 20 + 211, 512, 40 + 111]  # prompt rows and text; Yahoo's are cut
    mean = [10 + 83, 20 + 94, 30 + 123, 40 + 55]
    per_row = [long, short, long, short]
    scale = 8 / 1585.5
    step_ms = sum(n * packed * w * scale for n, w in zip(steps, longest, strict=True))
    row_ms = sum(n * r * w * scale for n, r, w in zip(rows, per_row, mean, strict=True))
    found = planner.cost_of(pack)
    assert found["steps"] == 3 * sum(steps)
    assert found["rows"] == 3 * sum(rows)
    assert found["minutes"] == pytest.approx(3 * (step_ms + row_ms) / 60_000)
    upper = 3 * (alone / packed * step_ms + row_ms) / 60_000
    assert found["minutes_alone"] == pytest.approx(upper)


def test_prompt_rows_and_retention_follow_the_methods(planner: ModuleType) -> None:
    s = planner.MethodSettings(prompt_length=10, shared_length=5, queue_size=3)
    rows = {
        "q-tuning": [15, 25, 35, 35],
        "per-task-prompt": [10] * 4,
        "per-task-prompt-long": [35] * 4,
        "prog-prompt": [10, 20, 30, 40],
        "shared-prompt": [40] * 4,
        "prompt-tuning": [10] * 4,
    }
    for method, expected in rows.items():
        assert [planner.prompt_rows(method, s, i) for i in range(1, 5)] == expected, method
    assert [planner.retains("q-tuning", s, i) for i in (1, 3, 4)] == [False, False, True]
    assert [planner.retains("shared-prompt", s, i) for i in (1, 2)] == [False, True]
    assert not planner.retains("prog-prompt", s, 9)


def test_the_plan_in_the_document_is_the_json(planner: ModuleType) -> None:
    page = (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "perf" / "results" / "plan.json").read_text())
    assert set(found["tables"]) == {file.name for file in TABLES}
    shown = page.split("<!-- plan -->\n")[1].split("<!-- /plan -->")[0]
    assert shown == planner.to_markdown(found)
    hours = [
        f"{round(entry['minutes'] / 60)} to {round(entry['minutes_alone'] / 60)}"
        for name, entry in found["tables"].items()
        if name in ("paper-t5-large.yaml", "paper-t5-large-ablations.yaml")
    ]
    assert f"{hours[1]} hours for the first file, {hours[0]} for the second" in page
    for name, entry in found["tables"].items():  # nothing is guessed
        of_smollm2 = "smollm2" in name and not name.startswith(("finetuning", "rehearsal"))
        timed = (name.startswith("paper-t5") and "rivals" not in name) or of_smollm2
        assert (entry["minutes"] is not None) == timed, name


# ── the recipe ───────────────────────────────────────────────────────────────────────────────


def write_data(folder: Path, stream: str) -> None:
    """Six rows per class and part for every task of a stream, of words that the tiny tokenizer knows."""
    for name in get_stream(stream).tasks:
        card, labels = list_tasks()[name]
        for part in ("train", "test"):
            rows = [
                {field: f"{TOPICS[k % 11]} {THINGS[i]} {part[:1]}" for field in card.fields}
                | {"label": k, "idx_question": i}
                for k in range(len(labels))
                for i in range(6)
            ]
            (folder / card.name).mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows), folder / card.name / f"{part}.parquet")


@pytest.mark.parametrize(
    ("table", "kind", "stream"),
    [("paper-t5-large", "t5", "order-01"), ("paper-bert-base", "bert", "order-04")],
)
def test_the_recipe_on_tiny_weights(
    table: str, kind: str, stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:  # fmt: skip
    """The document's commands on the shortest order, with another model, one epoch and two shots."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = make_model(kind), make_tokenizer(kind)
    labels = [word for t in get_stream(stream).tasks for word in list_tasks()[t][0].label_words.values()]  # fmt: skip
    tokenizer.add_tokens(" ".join(labels).split())
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    write_data(tmp_path / "data", stream)
    sweep = (
        "sweep", str(ROOT / "tables" / f"{table}.yaml"), "--stream", stream, "--model", "./model", "--data", "data",
        "--shots", "2", "--set", "epochs=1", "--set", "prompt_length=2", "--set", "shared_length=2",
        "--set", "mlp_hidden=8", "--test-limit", "2", "--seeds", "0", "--device", "cpu",
    )  # fmt: skip
    code, said = command(*sweep)
    assert code == 0, said
    assert "2 packs finished, 0 failed" in said
    records = [json.loads(file.read_text()) for file in Path("runs").rglob("result.json")]
    assert {r["method"] for r in records} == {"q-tuning", "prog-prompt"}
    assert {r["stream"] for r in records} == {stream}
    assert all(len(r["tasks"]) == len(get_stream(stream).tasks) for r in records)
    assert all(r["settings"]["mlp"] and r["settings"]["queue_size"] == 5 for r in records)
    assert command(*sweep)[0] == 0  # finished: answers at once
    assert command("report", "runs", "-o", "table.md")[0] == 0
    assert "prog-prompt" in Path("table.md").read_text()
