"""The page and the tables, from records of tiny runs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qtuning import cli
from qtuning.errors import RecordError
from qtuning.records import memory
from qtuning.report.charts import line_chart
from qtuning.report.comparing import compare, overviews, squares
from qtuning.report.export import to_csv, to_latex, to_markdown
from qtuning.report.gather import gather
from qtuning.report.page import render_page
from qtuning.report.tables import Group, group_runs, papers_numbers
from qtuning.runs import RunConfig, run, run_folder
from tests.conftest import make_model, make_tokenizer

SETTINGS = {
    "epochs": 1,
    "prompt_length": 2,
    "shared_length": 2,
    "queue_size": 2,
    "shots": 4,
    "validation_limit": 4,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds each on a stream of three tasks."""
    folder = tmp_path_factory.mktemp("report")
    make_model("bert").save_pretrained(folder / "model")
    make_tokenizer("bert").save_pretrained(folder / "model")
    stream = folder / "three.yaml"
    stream.write_text("name: three\nversion: 1\ndescription: three\ntasks: [spam, tone, urgency]\n")
    for method in ("q-tuning", "per-task-prompt"):
        config = RunConfig(
            str(stream), method, str(folder / "model"), test_limit=6, settings=SETTINGS
        )
        run(config, [0, 1], folder / "runs", device="cpu")
    return folder / "runs"


def test_a_record_says_what_a_reader_needs(runs: Path) -> None:
    record = json.loads(next(runs.rglob("q-tuning/0-*/result.json")).read_text())
    assert record["schema"] == 1
    assert record["backward_transfer"] == 0.0
    assert record["forgetting"] == 0.0
    assert {"torch", "transformers", "python", "device"} <= set(record["versions"])
    task = record["tasks"]["tone"]
    assert task["split"] == {"train": 12, "validation": 12, "test": 18}
    assert len(task["fingerprint"]) == 16
    assert task["unchanged"]
    assert len(record["matrix"]) == 4
    assert record["queue_keeps"][2][2] == pytest.approx(1.0, abs=1e-3)
    assert record["queue_keeps"][2][0] < 1.0  # trimmed
    assert [cost["task"] for cost in record["costs"]] == ["spam", "tone", "urgency"]


def test_the_page_is_whole_and_asks_for_nothing_outside(runs: Path) -> None:
    page = render_page(gather([runs]))
    assert not re.search(r"(src|href)=|url\(|@import|https?://", page)
    wanted = ("Score matrix", "What the queue keeps", "What each task draws on", "sign-flip",
              "prefers-color-scheme", 'name="viewport"', "per-task-prompt")  # fmt: skip
    assert [word for word in wanted if word not in page] == []
    assert "2 methods, 1 stream, 1 backbone. Scores" in page
    assert page.count("<svg") >= 9
    assert len(page) < 400_000


def test_a_stream_that_is_asked_at_its_end_alone(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chart instead of a matrix that is empty but for its diagonal and its last row."""
    folder = runs.parent
    config = RunConfig(
        str(folder / "three.yaml"),
        "q-tuning",
        str(folder / "model"),
        test_limit=6,
        inner_rows=0,
        settings=SETTINGS,
    )
    run(config, [0, 1], tmp_path, device="cpu")
    records = gather([tmp_path])
    (group,) = group_runs(records.results)
    learnt = [[task["when_learnt"] for task in run["tasks"].values()] for run in group.runs]
    means = [(a + b) / 2 for a, b in zip(*learnt, strict=True)]
    expected = [sum(means[:n]) / n for n in (1, 2, 3)]
    assert group.mean_curve() == pytest.approx(expected)  # its answers are those of then
    page = render_page(records)
    assert "Score matrix" not in page
    assert "Score of each task" in page
    assert "so without a line" not in page
    for run_ in records.results:
        run_["tasks"]["spam"]["unchanged"] = False
    (changing,) = group_runs(records.results)
    assert changing.mean_curve() == []
    assert "so without a line: q-tuning." in render_page(records)
    whole = render_page(gather([runs]))
    assert "Score matrix" in whole
    assert "<h3>What the queue keeps</h3>" in page
    monkeypatch.setattr("qtuning.report.page.MOST_ROWS", 2)
    long = render_page(records)
    assert "<summary>What the queue keeps</summary>" in long
    assert long.count("<details>") == long.count("</details>")


def test_groups_comparisons_and_tables(runs: Path) -> None:
    groups = group_runs(gather([runs]).results)
    assert {g.label for g in groups} == {"q-tuning", "per-task-prompt"}
    assert all(g.seeds == [0, 1] for g in groups)
    (pair,) = compare(groups)
    assert pair.seeds == 2
    assert pair.p >= 0.5  # two seeds cannot say more
    again = [replace(g, stream="other") for g in groups]
    pairs = compare([*groups, *again])
    assert [each.where.split(",")[0] for each in pairs][::2] == ["mean of 2 streams", "other"]
    assert {(each.first, each.difference) for each in pairs} == {(pair.first, pair.difference)}
    apart = [replace(g, label="x") for g in again if g.label == "q-tuning"]
    assert len(compare([*groups, *apart])) == 1  # nothing that both streams have
    check_squares_and_overviews(groups, again)
    assert to_markdown(groups).count("\n") == 4
    assert r"\toprule" in to_latex(groups)
    assert to_csv(groups).startswith("stream,method,backbone,seeds")


def check_squares_and_overviews(groups: list[Group], again: list[Group]) -> None:
    """A row less a column is minus the column less the row; means are those of seeds that all streams have."""
    (pair,) = compare(groups)
    (square,) = squares([pair])
    assert square.labels == (pair.first, pair.second)
    (nothing, there), (back, _) = square.cells
    assert nothing is None
    assert there == pair
    assert (back.first, back.difference, back.p) == (pair.second, -pair.difference, pair.p)
    assert overviews(groups) == []  # one stream: the summary has it all
    (found,) = overviews([*groups, *(replace(g, runs=g.runs[:1]) for g in again[:1])])
    assert found.streams == (groups[0].stream, "other")
    whole, lone = found.rows
    assert whole[0] == again[0].label
    assert list(whole[2]) == [again[0].seeds[0]]
    assert lone[1][1] == lone[2] == {}  # not run on the other


def test_methods_on_several_streams_come_first_in_the_page(runs: Path, tmp_path: Path) -> None:
    for file in runs.rglob("result.json"):
        record = json.loads(file.read_text())
        for stream in ("one", "two"):
            copy = tmp_path / stream / record["method"] / str(record["seed"]) / "result.json"
            copy.parent.mkdir(parents=True)
            record["stream"] = record["config"]["stream"] = stream
            copy.write_text(json.dumps(record))
    page = render_page(gather([tmp_path]))
    assert "<th>one</th><th>two</th><th>mean of 2 streams</th>" in page
    assert page.index("mean of 2 streams") < page.index("Every stream by itself")
    assert re.search("<summary>two, .*model</summary>", page)
    assert re.search("<h3>mean of 2 streams, .*model</h3>", page)
    assert page.count("<details>") == page.count("</details>")
    shutil.rmtree(tmp_path / "one" / "q-tuning")
    shutil.rmtree(tmp_path / "two" / "per-task-prompt")
    apart = render_page(gather([tmp_path]))
    assert "<th>one</th><th>two</th></tr>" in apart  # no method has both, so there is no mean


def test_lines_of_a_chart_can_be_told_apart() -> None:
    names = [f"method {i}" for i in range(18)]
    chart = line_chart({name: [0.1, 0.2] for name in names}, ["a", "b"], "many")
    strokes = re.findall(r"<polyline [^>]*(stroke=.*?)/>", chart)
    assert len(set(strokes)) == 18
    assert re.findall(r"<path [^>]*(stroke=.*?)/>", chart) == strokes  # the keys beside it


def test_unfinished_and_damaged_records_are_shown(runs: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(runs, tmp_path / "runs")
    results = sorted((tmp_path / "runs").rglob("result.json"))
    results[0].unlink()
    results[1].write_text("{half")
    records = gather([tmp_path / "runs"])
    assert len(records.results) == 2
    assert records.unfinished[0].tasks_done == ["spam", "tone", "urgency"]
    assert len(records.unreadable) == 1
    page = render_page(records)
    assert "Not finished" in page
    assert "Not readable" in page
    with pytest.raises(RecordError, match="no records under"):
        gather([_empty(tmp_path)])


def _empty(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def test_the_command(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for name in ("page.html", "table.md", "table.tex", "table.csv"):
        words = [
            "qtuning",
            "report",
            str(runs),
            "-o",
            str(tmp_path / name),
            "--figures",
            str(tmp_path / "figures"),
        ]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        assert (tmp_path / name).stat().st_size > 100
    figures = {file.name for file in (tmp_path / "figures").glob("*.png")}
    kinds = ("average", "per-task-prompt-matrix", "q-tuning-matrix")
    assert len(figures) == 3
    assert all(any(name.endswith(f"-model-{kind}.png") for name in figures) for kind in kinds)
    assert "4 finished runs" in capsys.readouterr().out


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["qtuning", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0


def test_a_dry_run_prints_the_plan_and_learns_nothing(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    stream, model = runs.parent / "three.yaml", runs.parent / "model"
    call(monkeypatch, "run", "--stream", stream, "--model", model, "--dry-run", "--output", tmp_path / "r",
         "--seeds", "0 1", "--device", "cpu", "--test-limit", "6", *settings)  # fmt: skip
    shown = " ".join(capsys.readouterr().out.split())
    assert "minutes for all" in shown
    assert "MiB of memory" in shown
    assert "urgency" in shown
    assert not (tmp_path / "r").exists()


def test_a_yaml_of_a_run_and_json_lines(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"stream: {runs.parent / 'three.yaml'}\nmodel: {runs.parent / 'model'}\ntest_limit: 6\n"
        f"settings: {json.dumps(SETTINGS)}\n"
    )
    call(monkeypatch, "validate", file)
    assert "fine, run of 'q-tuning'" in capsys.readouterr().out
    call(
        monkeypatch,
        "run",
        file,
        "--show",
        "json",
        "--device",
        "cpu",
        "--output",
        tmp_path / "r",
        "--set",
        "train.epochs=2",
    )
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "start"
    assert kinds.count("epoch") == 6
    assert kinds.count("task") == 3
    assert kinds[-1] == "result"


def test_the_papers_numbers_stand_beside() -> None:
    plain = {
        "scale": True,
        "shared_length": 10,
        "retention": "kl",
        "eviction": "pca",
        "queue_size": 10,
    }
    for changed, expected in (
        ({}, ["79.7 (t5-large)", "56.2 (bert-base)"]),
        ({"queue_size": 5}, ["78.8 (t5-large)", "56.0 (bert-base)"]),
        ({"eviction": "fifo", "queue_size": 5}, ["77.2 (t5-large)", "53.8 (bert-base)"]),
        ({"eviction": "none"}, ["79.1 (t5-large)", "55.2 (bert-base)"]),
        ({"scale": False}, []),  # an ablation: the paper has no figures for single orders
    ):
        assert papers_numbers("order-09", "q-tuning", {**plain, **changed}) == expected
    assert papers_numbers("order-11", "q-tuning", {**plain, "queue_size": 5}) == ["90.9 (t5-large)"]
    assert papers_numbers("order-09", "idbr", {}) == ["37.9 (bert-base)"]
    assert papers_numbers("demo", "q-tuning", plain) == []


def test_a_changed_setting_is_another_folder(tmp_path: Path) -> None:
    first = RunConfig("demo", settings={"epochs": 1}).resolved()
    second = RunConfig("demo", settings={"epochs": 2}).resolved()
    assert run_folder(tmp_path, first, 0) != run_folder(tmp_path, second, 0)
    assert run_folder(tmp_path, first, 0).parent == tmp_path / "demo" / "q-tuning"


def test_tensors_without_memory_are_not_counted(recwarn: pytest.WarningsRecorder) -> None:
    """Compiling leaves such behind, and they warn when asked where they lie."""
    before = memory()["live_tensor_bytes"]
    with FakeTensorMode():
        traced = torch.ones(1000, 1000)
    real = torch.ones(10, 10)
    assert memory()["live_tensor_bytes"] - before == real.nbytes
    assert traced.shape == (1000, 1000)
    assert not [each for each in recwarn if "FakeTensor" in str(each.message)]


def test_memory_does_not_grow_with_finished_tasks(runs: Path, tmp_path: Path) -> None:
    """Fourteen tasks on a tiny model: no more live tensor bytes at the end than once the queue was full."""
    config = RunConfig(
        "starter", "q-tuning", str(runs.parent / "model"), test_limit=4, settings=SETTINGS
    )
    (record,) = run(config, [0], tmp_path, device="cpu")
    live = [cost["live_tensor_bytes"] for cost in record["costs"]]
    assert live[-1] <= 1.02 * live[3]
    assert all(cost["resident_bytes"] > 0 for cost in record["costs"])
