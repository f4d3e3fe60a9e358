"""Figures in the pages are those of the measurements and of the summary."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median

import pytest

from qtuning.report.gather import gather
from qtuning.summary import summarise
from tests.docs.committed import ROOT, between, findings


def test_the_findings_figures_are_those_of_the_records() -> None:
    page = findings("reasons")
    averaged = json.loads((ROOT / "results" / "tuning-smollm2-averaged.json").read_text())["tried"]
    words = page.split("## Averaging the prompt")[1].split("The first round")[0]
    words += page.split("## What was tried")[1]
    for entry in averaged:
        scores = [mean(own.values()) for own in entry["scores"].values()]
        assert entry["mean"] == pytest.approx(mean(scores), abs=1e-4)
        if entry["method"] not in ("per-task-prompt", "prog-prompt"):
            assert f"{100 * entry['mean']:.1f}" in words, entry["settings"]
    starts = json.loads((ROOT / "results" / "tuning-smollm2-starts.json").read_text())["tried"]
    for entry in starts:
        scores = [mean(own.values()) for own in entry["scores"].values()]
        assert entry["mean"] == pytest.approx(mean(scores), abs=1e-4)
        assert f"{100 * entry['mean']:.1f}" in page.split("## What was tried")[1], entry["settings"]
    assert starts[0]["settings"]["warm_start"] == "answers"  # the best, and so q-tuning-plus
    tried = json.loads((ROOT / "results" / "tuning-smollm2.json").read_text())["tried"]
    table: dict[str, dict[str, str]] = {}
    for entry in tried:
        scores = entry["scores"].values()
        assert entry["mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-4)
        rate = entry["settings"]["prompt_lr"]
        if len(entry["settings"]) == 1:
            table.setdefault(entry["method"], {})[f"{rate}"] = f"{100 * entry['mean']:.1f}"
        elif not {"loss_over", "warm_start"} <= entry["settings"].keys():  # said in words
            assert f"{100 * entry['mean']:.1f}" in page.split("## What was tried")[1]
    for method, found in table.items():
        lines = page.split("The first round")[1].splitlines()
        (line,) = [line for line in lines if line.startswith(f"| `{method}`, ")]
        cells = [cell.strip() for cell in line.split("|")[2:4]]
        assert cells == [found.get("0.01", ""), found.get("0.03", "")]
    loss = json.loads((ROOT / "perf" / "results" / "transfer-smollm2.json").read_text())["loss"]
    best = {
        task: min((p for p in row if p not in (task, "vocabulary")), key=row.get)
        for task, row in loss.items()
    }
    for one, other in (("yelp", "amazon"), ("imdb", "sst2"), ("mnli", "rte")):
        assert (best[one], best[other]) == (other, one)
    said = "lower loss ({:.1f}) than under their own ({:.1f})"
    assert said.format(loss["yelp"]["amazon"], loss["yelp"]["yelp"]) in page
    assert f"`imdb`'s prompt costs {loss['sst2']['imdb']:.2f}" in page
    assert f"under `yelp`'s costs {loss['amazon']['yelp']:.1f}" in page
    moved = sorted(
        abs(weight - 1)
        for file in (ROOT / "results" / "order-09-minilm" / "q-tuning").glob("*/result.json")
        if (record := json.loads(file.read_text()))["config"]["preset"] == "minilm"
        for task in record["tasks"].values()
        for weight in task["scale"]
    )
    average, high = sum(moved) / len(moved), moved[int(0.95 * len(moved))]
    assert f"ends {100 * average:.0f} % from 1\non average, {100 * high:.0f} %" in page


def test_the_summary_comes_from_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by `qtuning summary results -o results/summary.json`, in the root: presets may be files."""
    monkeypatch.chdir(ROOT)
    committed = json.loads((ROOT / "results" / "summary.json").read_text())
    assert committed == summarise(gather([Path("results")]).results)


def test_the_table_of_found_tasks_comes_from_the_measurements() -> None:
    page = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")
    for stream in ("order-09", "order-11"):
        file = ROOT / "perf" / "results" / f"finding-{stream}-minilm.json"
        record = json.loads(file.read_text())
        whole, half = record["all_taught"], record["every_second_taught"]
        shares = (whole["task_found"], whole["found_and_known"], half["called_unknown"])
        cells = " | ".join(f"{share:.1%}".replace("%", " %") for share in shares)
        assert f"| {whole['taught']} | {cells} |" in page


def serving_table() -> str:
    """What `perf/serving.py` measured, as docs/serving.md shows it."""
    folder = ROOT / "perf" / "results"
    names = ("mixed-minilm", "load-minilm", "load-tiny", "soak-tiny")
    mixed, minilm, tiny, soak = (
        json.loads((folder / f"serving-{name}-cpu.json").read_text()) for name in names
    )
    lines = ["| what | all-MiniLM-L6-v2 | tiny random BERT |", "|---|---|---|"]

    def row(name: str, *cells: str) -> None:
        lines.append(f"| {' | '.join((name, *cells))} |")

    for kind, about in (("ours", "this server"), ("plain", "a plain FastAPI loop")):
        cells = []
        for load in (minilm, tiny):
            rounds = load["rounds"][kind]
            times = [f"{median(each[key] for each in rounds):.0f}" for key in ("p50_ms", "p99_ms")]
            rate = load["requests_per_second"][kind]
            cells.append(f"{rate:.0f} a second, p50 {times[0]} ms, p99 {times[1]} ms")
        row(f"{about}, {minilm['clients']} clients, a text each", *cells)
    row("ratio", f"{minilm['ratio']:.1f} x", f"{tiny['ratio']:.1f} x")
    row("64 texts of 50 tasks against 64 of one", f"{mixed['mixed_over_single']:.2f} x", "")
    row("with 1,000 tasks known against 10", f"{mixed['thousand_over_ten']:.2f} x", "")
    asked = sum(soak["statuses"].values())
    memory = soak["resident_mib"]
    said = (
        f"{asked:,} requests, {soak['taught']} tasks taught and {soak['removed']} removed, "
        f"{sum(n for code, n in soak['statuses'].items() if int(code) >= 400)} errors, "
        f"{soak['wrong_answers']} wrong answers, {memory['after_a_tenth']} to {memory['end']} MiB"
    )
    long = f"{soak['seconds'] / 60:.0f} minutes, {soak['clients']} clients"
    row(f"{long}, teaching and removing meanwhile", "", said)
    return "\n".join(lines) + "\n"


def test_the_table_of_serving_comes_from_the_measurements() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert page.split("<!-- serving -->\n")[1].split("<!-- /serving -->")[0] == serving_table()
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    results = ROOT / "perf" / "results"
    load = json.loads((results / "serving-load-minilm-cpu.json").read_text())
    mixed = json.loads((results / "serving-mixed-minilm-cpu.json").read_text())
    assert f"it takes {load['ratio']:.1f} times the requests of a plain FastAPI loop" in readme
    assert f"in one batch cost {mixed['mixed_over_single']:.2f} times 64 of one task" in readme


def test_the_figures_of_training_weights_are_those_of_the_measurements() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "perf" / "results" / "weights-minilm-cpu.json").read_text())
    step, size = found["median_ms"], found["texts"]["mean positions"]
    said = f"{size:.0f} positions, two threads: {step['float32']:.0f} ms a step in float32, {step['bf16']:.0f} with"
    assert said in page
    assert step["compiled"] > step["bf16"]
    assert found["versions"]["threads"] == 2
    half = json.loads((ROOT / "perf" / "results" / "half-cpu.json").read_text())
    assert half["versions"]["multiplies_bf16"]
    assert f"`{half['command']}`" in page
    assert between(page, "cpu-half") == [
        f"| `{each['model']}` | {each['words']} | {' | '.join(f'{ms:.0f}' for ms in each['median_ms'].values())} | "
        f"{' | '.join(f'{times:.1f}' for times in each['times_as_fast_as'].values())} |"
        for each in half["results"]
    ]
    times = sorted(f"{each['times_as_fast_as']['float32']:.1f}" for each in half["results"])
    guide = " ".join((ROOT / "docs" / "how-to.md").read_text(encoding="utf-8").split())
    assert f"a step was {times[0]} to {times[-1]} times as fast there" in guide
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"`--dtype bf16` makes steps {times[0]} to {times[-1]} times as fast where" in readme
    for each in half["results"]:
        exact, *rounded = (losses[0] for losses in each["first_losses"].values())
        assert rounded[0] == rounded[1]
        assert abs(rounded[0] - exact) < (0.01 if each["model"] == "minilm" else 0.1)
    found = json.loads((ROOT / "perf" / "results" / "weights-smollm2-135m-gpu.json").read_text())
    step, size = found["median_ms"], found["texts"]["mean positions"]
    said = (
        f"8 texts of about {size:.0f} positions: {step['float32']:.0f} ms a step in float32, {step['bf16']:.0f} with "
        f"products in bfloat16, {step['recorded']:.1f} with recorded passes, {step['compiled']:.1f} with"
    )
    assert said in page
    times = step["float32"] / step["compiled"], step["bf16"] / step["compiled"]
    assert (
        "{:.1f} times as fast as the first and {:.1f} times as fast as the second".format(*times)
        in page
    )
    losses = list(
        zip(*(found["first_losses"][way] for way in ("bf16", "recorded", "compiled")), strict=True)
    )
    assert f"differ by at most {max(max(each) - min(each) for each in losses):.3f};" in page
    half, compiled = (sorted(found["step_ms"][way]) for way in ("bf16", "compiled"))
    spread = f"{half[0]:.0f} to {half[2]:.0f} and {compiled[0]:.1f} to {compiled[2]:.1f} over three"
    assert spread in page


def test_the_figures_of_lines_are_those_of_the_measurements() -> None:
    results = ROOT / "perf" / "results"
    record = json.loads((results / "padding-gpu.json").read_text())
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert between(page, "lines") == [
        f"| {each['place']} | {each['padded']['ms']:.1f} | {each['padded']['positions']:,.0f} | "
        f"{each['line']['ms']:.1f} | {each['line']['positions']:,.0f} | {each['ratio']:.2f} |"
        for each in record["results"]
    ]
    assert max(each["largest_difference_of_first_losses"] for each in record["results"]) <= 0.05
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"another {record['ratio']:.1f} times as fast for {record['lanes']} runs" in readme
    assert f"`{record['command']}`" in page
    on_cpu = json.loads((results / "padding-cpu.json").read_text())
    assert between(page, "cpu-lines") == [
        f"| {each['place']}, `{each['tasks'][0]}` | {padded['ms'] / 1000:.1f} | {padded['positions']:,.0f} | "
        f"{line['ms'] / 1000:.1f} | {line['positions']:,.0f} | {each['ratio']:.1f} | {each['scoring_ratio']:.1f} |"
        for each in on_cpu["results"]
        for padded, line in [(each["padded"], each["line"])]
    ]
    assert f"`{on_cpu['command']}`" in page
    assert max(each["largest_difference_of_first_losses"] for each in on_cpu["results"]) <= 1e-5
    fastest = [f"{each['ratio']:.1f}" for each in on_cpu["results"]]
    assert (
        f"On two CPU cores a step of short texts is {' to '.join(fastest)} times as fast that way"
        in readme
    )
    copies = json.loads((results / "padding-copies-gpu.json").read_text())["results"]
    said = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert {f"{each['line']['ms']:.0f}" for each in copies} == {"43"}
    assert "a step of 27 lanes took 43 ms; with these it takes 29 to 35" in said
    assert sorted(f"{each['line']['ms']:.0f}" for each in record["results"]) == ["29", "35"]
    pack = json.loads((results / "pack-63-gpu.json").read_text())
    claims = (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")
    for said in (
        f"a pack of {pack['lanes']} lanes",
        f"took {pack['seconds'] / 60:.0f} minutes:",
        f"{sum(task['steps_s'] for task in pack['tasks']) / 60:.1f} of steps, "
        f"{sum(task['scoring_s'] for task in pack['tasks']) / 60:.1f} of scoring",
        f"a run's share {pack['seconds'] / pack['lanes']:.1f} seconds",
    ):
        assert said in claims
    shared = json.loads((results / "sharing-gpu.json").read_text())
    busy = mean(each >= 95 for each in shared["load_percent"])
    assert (
        f"Five processes on one card (under NVIDIA's MPS), {shared['seconds'] / 60:.0f} minutes"
        in claims
    )
    assert f"one pack of 60 lanes ({shared['processes'][1]['seconds'] / 60:.1f} minutes" in claims
    assert (
        f"in {100 * busy:.0f} % of all samples,\n  at {median(shared['watts']):.0f} of its 700 watts"
        in claims
    )
    earlier = pack["earlier_pack_of_padded_rows"]
    assert f"had {earlier['seconds'] / earlier['lanes']:.1f}" in claims


def test_the_table_of_rehearsal_comes_from_the_measurements() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / "perf" / "results" / "rehearsal-cpu.json").read_text())
    assert f"`{record['command']}`" in page
    assert between(page, "cpu-rehearsal") == [
        f"| {each['words']} | {each['pseudo_samples']} | {each['median_ms']['read at each step']:.0f} "
        f"| {each['median_ms']['read once']:.0f} | {each['times_as_fast']:.1f} |"
        for each in record["results"]
    ]
    losses = [each["losses"].values() for each in record["results"]]
    assert all(14 < loss < 16 for own in losses for loss in own)
    apart = max(abs(once - again) for once, again in losses)
    assert f"differ by at most {apart:.2f}, as bf16 does" in page
