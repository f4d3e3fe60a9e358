"""Commands and snippets in the documents run as written; tables in them are current."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pytest
from rich.console import Console

import qtuning
from qtuning import cli, config, demo
from qtuning.errors import CollectionError
from qtuning.presets import get_preset
from qtuning.report.comparing import compare
from qtuning.report.export import to_markdown
from qtuning.report.gather import gather
from qtuning.report.tables import group_runs
from qtuning.run_labels import label_of
from qtuning.serve.run import free_port
from qtuning.summary import summarise
from qtuning.tuning import BUDGET
from tests.conftest import make_model, make_tokenizer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "REPRODUCIBILITY.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW = ("qtuning demo", "make ", "cd ", "git ", "pip ", "source ")
"""Commands that other tests run, or that set up a machine."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the examples in it, as a user's clone has them."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the commands of a block."""

    def run(block: str) -> None:
        for line in block.splitlines():
            command = line.split(" #")[0].strip()
            if not command or command.startswith(SLOW):
                continue
            words = shlex.split(command)
            assert words[0] == "qtuning", command
            monkeypatch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert ended.value.code in (0, None), (command, capsys.readouterr().err)

    return run


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_snippets_and_commands_run(page: Path, workplace: Path, call) -> None:
    for block in blocks(page, "bash"):
        call(block)
    shutil.rmtree(workplace / "support", ignore_errors=True)
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), {})


@pytest.mark.skipif(shutil.which("curl") is None, reason="its commands use curl")
def test_the_support_teams_month(workplace: Path) -> None:
    """Blocks of `shell`, all in one shell; the port is a free one."""
    port = str(free_port("127.0.0.1"))
    text = "\n".join(blocks(ROOT / "docs" / "serving.md", "shell")).replace(":8000", f":{port}")
    text = text.replace("qtuning serve support", f"qtuning serve support --port {port}")
    script = f'qtuning() {{ "{sys.executable}" -c "from qtuning.cli import main; main()" "$@"; }}'
    serve = f'"{sys.executable}" -c "from qtuning.cli import main; main()" serve'  # $! is its own
    whole = "\n".join(["set -euo pipefail", script, text.replace("qtuning serve", serve)])
    found = subprocess.run(["bash", "-c", whole], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr + found.stdout
    said = found.stdout
    assert said.count('"state": "done"') == 2
    assert '"removed":"refunds"' in said
    assert '"task": "delivery", "label": ' in said
    assert "accepted requests were answered" in said
    left = json.loads((workplace / "support" / "manifest.json").read_text())["tasks"]
    assert list(left) == ["delivery", "account"]


@pytest.mark.ray
def test_commands_on_ray_run(workplace: Path, call) -> None:
    """Blocks of `sh`, after those of `bash` that they build on."""
    page = ROOT / "docs" / "sweeps.md"
    for block in [*blocks(page, "bash"), *blocks(page, "sh")]:
        call(block)
    assert (workplace / "labelled.csv").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readmes_figures_are_those_of_the_records() -> None:
    records = [
        json.loads(file.read_text()) for file in sorted((ROOT / "results").glob("demo-seed*.json"))
    ]
    assert [record["seed"] for record in records] == [0, 1, 2]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("<!-- demo-figures -->")[1].split("<!-- /demo-figures -->")[0]
    found = [float(value) for value in re.findall(r"\| (-?\d+\.\d) \|", table)]
    keys = ("average_score", "linear_probe", "majority_class", "backward_transfer")
    means = [100 * sum(record[key] for record in records) / len(records) for key in keys]
    assert found == [round(mean, 1) + 0.0 for mean in means]
    groups = group_runs(gather([ROOT / "results" / "order-09-minilm"]).results)
    for group in groups:
        assert f"{100 * group.mean_sd('average_score')[0]:.1f}" in readme, group.label


def settings_table() -> str:
    """One line per setting: name, default, the sentence under the field."""
    lines = ["| setting | default | what |", "|---|---|---|"]
    for cls in (config.MethodSettings, config.TrainSettings):
        body = ast.parse(inspect.getsource(cls)).body[0].body
        said = {
            field.target.id: doc.value.value
            for field, doc in itertools.pairwise(body)
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
        }
        for field in fields(cls):
            lines.append(f"| `{field.name}` | `{field.default}` | {said[field.name]} |")
    return "\n".join(lines)


def test_the_settings_table_is_current() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    found = page.split("<!-- settings -->\n")[1].split("\n<!-- /settings -->")[0]
    assert found == settings_table()


def test_public_names_are_documented() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for name in set(qtuning.__all__) - {"__version__"}:
        assert f"`{name}`" in reference, name


def test_the_paper_index_names_code_that_exists() -> None:
    source = ROOT / "src" / "qtuning"
    text = (ROOT / "docs" / "paper-index.md").read_text(encoding="utf-8")
    for module, name in re.findall(r"`((?:methods/)?\w+)\.((?!py)\w+)", text):
        assert f" {name}(" in (source / f"{module}.py").read_text().replace(":", "("), (
            module,
            name,
        )


def test_the_demo_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make demo` shows, in seconds: matrix, zero forgetting, predictions, where it was saved."""
    folder = tmp_path / "model"
    make_model("bert").save_pretrained(folder)
    make_tokenizer("bert").save_pretrained(folder)
    tiny = {**demo.SETTINGS, "epochs": 1, "prompt_length": 2, "shared_length": 2}
    monkeypatch.setattr(demo, "SETTINGS", tiny)
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    demo.run_demo(tmp_path / "out", str(folder), console=console)
    shown = " ".join(console.export_text().split())
    assert "byte for byte as when learnt 8 of 8" in shown
    assert "forgetting (backward transfer) 0.0%" in shown
    assert "weights unchanged (sha256) yes" in shown
    assert "times the full queue made room 4" in shown
    assert "a linear probe on the same texts" in shown
    assert "predict" in shown
    assert (tmp_path / "out-report.html").stat().st_size > 10_000
    assert (tmp_path / "out" / "manifest.json").exists()
    assert len(qtuning.QTuner.from_pretrained(tmp_path / "out").tasks) == 8


def test_the_demo_does_not_overwrite_a_users_task(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model("bert").save_pretrained(folder)
    make_tokenizer("bert").save_pretrained(folder)
    tuner = qtuning.QTuner(str(folder), epochs=1, prompt_length=2, shared_length=2, queue_size=2)
    tuner.learn(qtuning.Task("mine", ["a", "b", "c", "d"] * 3, ["x", "y"] * 6), progress=False)
    tuner.save_pretrained(tmp_path / "out")
    with pytest.raises(CollectionError, match="'mine', which the demo did not teach"):
        demo.run_demo(tmp_path / "out", str(folder))
    (tmp_path / "file").write_text("")
    with pytest.raises(CollectionError, match="is a file"):
        demo.run_demo(tmp_path / "file", str(folder))


def check_what_is_said_of_order_nine(results: list[dict[str, Any]], page: str) -> None:
    """Distances between methods, how much they forget, and the other pages' lines on them."""
    own: dict[str, list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda r: r["seed"]):
        own.setdefault(result["method"], []).append(result)
    score = {name: [100 * r["average_score"] for r in runs] for name, runs in own.items()}
    best = score["per-task-finetune"]
    others = [score[name] for name in ("multi-task", "continual-finetune", "per-task-prompt")]
    far = [f"{mean(best) - mean(other):.1f}" for other in others]
    assert (
        f"{far[0]} points above all tasks at once, {far[1]} above fine-tuning one model on and on "
        f"and {far[2]} above a prompt per task, on all three seeds" in page
    )
    assert all(a > b for other in others for a, b in zip(best, other, strict=True))
    fell = {
        name: f"{100 * mean(r['forgetting'] for r in own[name]):.1f}"
        for name in ("continual-finetune", "a-gem", "replay", "idbr", "ewc")
    }
    assert (
        f"is {fell['continual-finetune']} points without protection, {fell['a-gem']} with A-GEM, "
        f"{fell['replay']} with replay, {fell['idbr']} with IDBR and {fell['ewc']} with EWC" in page
    )
    on_and_on = own["continual-finetune"]
    back = f"−{-100 * mean(r['backward_transfer'] for r in on_and_on):.1f}"
    told = f"{mean(score['continual-finetune']):.1f}"
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"one model on and on {told} (backward transfer {back})" in readme
    claims = (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")
    spread = f"{stdev(score['continual-finetune']):.1f}"
    assert f"{told} ± {spread}, backward transfer {back} (order 9)" in claims


def test_the_table_of_methods_comes_from_the_records() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    nine = page.split("<!-- order-09 -->\n")[1].split("<!-- /order-09 -->")[0]
    found = gather([ROOT / "results" / "order-09-minilm"])
    assert nine == to_markdown(group_runs(found.results))
    four = page.split("<!-- order-04 -->\n")[1].split("<!-- /order-04 -->")[0]
    weights = gather([ROOT / "results" / "order-04-minilm"]).results
    assert four == to_markdown(group_runs(weights))
    fell = mean(100 * r["forgetting"] for r in weights if r["method"] == "continual-finetune")
    assert f"on 64 texts, is {fell:.1f})" in page
    check_what_is_said_of_order_nine(found.results, " ".join(page.split()))
    shown = page.split("<!-- starter-four -->\n")[1].split("<!-- /starter-four -->")[0]
    records = gather([ROOT / "results" / "starter-four-minilm"])
    assert shown == to_markdown(group_runs(records.results))
    transfer = {r["method"]: [] for r in records.results}
    for result in records.results:
        transfer[result["method"]].append(result["backward_transfer"])
    means = {method: sum(values) / len(values) for method, values in transfer.items()}
    assert means["continual-finetune"] < -0.05
    assert all(means[name] > means["continual-finetune"] for name in ("replay", "ewc", "a-gem"))
    assert all(means[name] == 0 for name in means if name.startswith("per-task"))


ORDERS = ("order-08", "order-09", "order-10")
CONTROL = "per-task-prompt-long"
TWENTY = "per-task-prompt, prompt_length 20"


def records_in(folder: str, model: str = "") -> dict[str, dict[tuple[str, int], dict]]:
    """Of each method, with what its preset was changed to, its records by order and seed."""
    found: dict[str, dict[tuple[str, int], dict]] = {}
    for record in _all_in(folder):
        if model not in ("", record["config"]["model"]):
            continue
        found.setdefault(label_of(record), {})[record["stream"], record["seed"]] = record
    return found


@cache
def _all_in(folder: str) -> list[dict]:
    files = (ROOT / "results" / folder).glob("*/*/*/result.json")
    return [json.loads(file.read_text()) for file in files]


def minutes(records: list[dict]) -> float:
    """From the beginning of the first to the end of the last."""
    began, ended = ([datetime.fromisoformat(r[key]) for r in records] for key in ("began", "ended"))
    return (max(ended) - min(began)).total_seconds() / 60


def flip_p(differences: list[float]) -> float:
    """The exact sign-flip test, by its definition."""
    flipped = [
        abs(sum(a * sign for a, sign in zip(differences, signs, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return mean(each >= abs(sum(differences)) - 1e-9 for each in flipped)


def seed_means(records: dict[tuple[str, int], dict], key: str = "average_score") -> list[float]:
    """In percent, over the three orders, seed by seed."""
    seeds = sorted({seed for _, seed in records})
    return [100 * mean(records[o, seed][key] for o in ORDERS) for seed in seeds]


def between(page: str, name: str) -> list[str]:
    """Lines of a table without its head."""
    inside = page.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
    return inside.strip().splitlines()[2:]


def test_the_findings_on_the_long_sequence_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    runs = records_in("long-smollm2")
    rules = {rule: runs.pop(f"q-tuning, eviction {rule}") for rule in ("fifo", "random")}
    seeds = {method: seed_means(own) for method, own in runs.items()}
    assert {m: len(own) for m, own in seeds.items()} == {
        **dict.fromkeys(("q-tuning", "q-tuning-plus", CONTROL, TWENTY), 6),
        **dict.fromkeys(("per-task-prompt", "prog-prompt", "shared-prompt"), 6),
        "prompt-tuning": 3,
    }
    shown_as = {
        "per-task-prompt": "`per-task-prompt`, 10 vectors",
        TWENTY: "`per-task-prompt`, 20 vectors",
    }
    shown = between(page, "long")
    assert len(shown) == len(seeds)
    for method, found in seeds.items():
        start = shown_as.get(method, f"`{method}`,")
        (line,) = [line for line in shown if line.startswith(f"| {start}")]
        each = ", ".join(f"{score:.1f}" for score in found)
        ahead = mean(found) - mean(seeds[CONTROL][: len(found)])
        minus = f" {ahead:+.1f} " if method != CONTROL else " "
        assert line.endswith(f"| {mean(found):.1f} ± {stdev(found):.1f} | {each} |{minus}|")
    for method, own in (*runs.items(), *rules.items()):
        for record in own.values():
            if method != "prompt-tuning":
                assert record["backward_transfer"] == 0
                assert all(task["unchanged"] for task in record["tasks"].values())
    lost = mean(100 * record["backward_transfer"] for record in runs["prompt-tuning"].values())
    assert f"Backward transfer is {lost:.1f} for `prompt-tuning`" in page
    lengths = {"prompt-tuning": 10, TWENTY: 20, "shared-prompt": 60, CONTROL: 60}
    for method, length in lengths.items():
        shown_rows = {t["prompt_rows"] for r in runs[method].values() for t in r["tasks"].values()}
        assert shown_rows == {length}
    for record in runs["q-tuning"].values():
        weights, length = record["tasks"]["sst2"]["scale"], record["settings"]["prompt_length"]
        old = [mean(weights[i : i + length]) for i in range(0, len(weights) - length, length)]
        assert round(min(old), 2) >= 0.93
        assert round(max(old), 2) <= 1.06

    def differences(one: str, other: str) -> list[float]:
        return [a - b for a, b in zip(seeds[one], seeds[other], strict=False)]

    short = "per-task-prompt"
    for one, other, seeds_above, said in (
        ("q-tuning", "prog-prompt", 6,
         "{:.1f} points above ProgPrompt on all six seeds (exact sign-flip test p = {:.2f}"),
        (short, "q-tuning", 3, "a per-task prompt of 10 vectors ({:.1f} below, p = {:.2f})"),
        ("shared-prompt", "q-tuning", 5, "{:.1f} below the shared prompt, on five of six seeds (p = {:.2f})"),
        (TWENTY, "q-tuning", 4, "It is {:.1f} above Q-tuning, on four of six seeds (p = {:.2f})"),
        (CONTROL, "q-tuning", 6, "is {:.1f} above Q-tuning on all six seeds (p = {:.2f})"),
    ):  # fmt: skip
        found = differences(one, other)
        assert sum(each > 0 for each in found) == seeds_above
        assert said.format(mean(found), flip_p(found)) in page
    first_three = differences(TWENTY, "q-tuning")[:3]
    assert min(first_three) > 0
    assert f"On the first three seeds that was {mean(first_three):.1f}, and on all\n  three" in page
    by_length = [mean(seeds[method]) for method in (short, TWENTY, CONTROL)]
    assert "({:.1f}, {:.1f} and {:.1f} for 10, 20 and 60)".format(*by_length) in page
    assert min(differences(CONTROL, short) + differences(CONTROL, TWENTY)) > 0
    assert sum(each > 0 for each in differences(TWENTY, short)) == 4
    assert f"10 without it have {mean(seeds[short][:3]):.1f} (below)" in page
    plus = differences("q-tuning-plus", CONTROL)
    assert sum(each > 0 for each in plus) == 5
    said = f"`q-tuning-plus` is {mean(plus):.1f} above the control, on five of six seeds (p = {flip_p(plus):.2f})"
    assert said in page
    assert f"that is {mean(plus):.1f} points (p = {flip_p(plus):.2f})" in (ROOT / "README.md").read_text()  # fmt: skip
    by_rule = {"pca": {k: r for k, r in runs["q-tuning"].items() if k[1] < 3}, **rules}
    whole = [mean(seed_means(own)) for own in by_rule.values()]
    said = "principal components {:.1f}, first-in-first-out {:.1f}, random {:.1f}"
    assert said.format(*whole) in page
    assert "queue of 5: {:.1f}, {:.1f}, {:.1f}".format(*whole) in (ROOT / "REPRODUCIBILITY.md").read_text()  # fmt: skip
    assert max(whole) - min(whole) < 0.2
    first, late, nine = (
        [
            100 * mean(task["score"] for r in own.values() for task in list(r["tasks"].values())[part])
            for own in by_rule.values()
        ]
        for part in (slice(5), slice(5, 15), slice(9))
    )  # fmt: skip
    assert "have {:.1f} in one pack and {:.1f} in the other".format(*first) in page
    assert "full queue: {:.1f}, {:.1f}, {:.1f},".format(*late) in page
    assert f"the first five are {first[1] - first[0]:.1f} apart" in page
    assert "in these runs the nine tasks have {:.1f}, {:.1f}, {:.1f}.".format(*nine) in page
    eleven = json.loads((ROOT / "results" / "long-smollm2-eleven.json").read_text())["scores"]
    before, now = {}, {}
    for method in ("q-tuning", CONTROL):
        own = [eleven[method][o] for o in ORDERS]
        before[method] = [100 * mean(mean(order[s].values()) for order in own) for s in "012"]
        now[method] = [
            100
            * mean(
                task["when_learnt"]
                for order in ORDERS
                for task in list(runs[method][order, seed]["tasks"].values())[:11]
            )
            for seed in range(3)
        ]
    said = ", ".join(f"{x:.1f}" for x in before["q-tuning"]) + " where these have "
    assert said + ", ".join(f"{x:.1f}" for x in now["q-tuning"]) in page
    moved = max(abs(a - b) for a, b in zip(before[CONTROL], now[CONTROL], strict=True))
    assert f"the control's differ by up to {moved:.1f}" in page
    single = [100 * record["forward_transfer"] for record in runs["q-tuning"].values()]
    assert f"range from {min(single):.1f} to {max(single):.1f}" in page
    last_five = {
        method: 100
        * mean(
            task["when_learnt"]
            for (order, _), record in runs[method].items()
            if order == "order-09"
            for task in list(record["tasks"].values())[-5:]
        )
        for method in (CONTROL, "q-tuning")
    }
    assert f"{last_five[CONTROL]:.1f} against {last_five['q-tuning']:.1f}." in page
    ahead = {m: mean(seed_means(own, "forward_transfer")) for m, own in runs.items()}
    for method, said in (
        ("q-tuning", "{:.1f} points above those before any task"),
        (CONTROL, "{:.1f} with the control"),
        ("shared-prompt", "{:.1f} with the shared prompt"),
        ("per-task-prompt", "{:.1f} with per-task prompts"),
        ("prog-prompt", "{:.1f} with ProgPrompt"),
    ):
        assert said.format(ahead[method]) in page
    alone = records_in("ablations-smollm2")[
        "q-tuning, retention none, scale false, shared_length 0"
    ]
    queue = mean(seed_means(alone, "forward_transfer"))
    assert f"{queue:.1f} with the queue alone" in page
    assert f"the queue alone has {queue:.1f};" in (ROOT / "REPRODUCIBILITY.md").read_text()
    for line in between(page, "places"):
        one, other = re.findall(r"`([\w-]+)`", line)
        found = [
            mean(
                100 * (own["score"] - runs[other][key]["tasks"][task]["score"])
                for key, record in runs[one].items()
                if key in runs[other]
                for task, own in list(record["tasks"].items())[first - 1 : last]
            )
            for first, last in ((1, 1), (2, 4), (5, 7), (8, 11), (12, 15))
        ]
        assert line.endswith("| " + " | ".join(f"{round(x, 1) + 0.0}" for x in found) + " |")
    readme = between((ROOT / "README.md").read_text(encoding="utf-8"), "long-figures")
    claims = (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")
    for method, found in seeds.items():
        (line,) = [line for line in readme if shown_as.get(method, f"`{method}`") in line]
        assert line.endswith(f"| {len(found)} | {mean(found):.1f} ± {stdev(found):.1f} |")
        assert f"{mean(found):.1f}" in claims
    moved = sorted(
        abs(weight - 1)
        for record in runs["q-tuning"].values()
        for task in record["tasks"].values()
        for weight in task["scale"]
    )
    said = "on SmolLM2-135M, orders 8 to 10, {:.0f} % and {:.0f} %"
    assert said.format(100 * mean(moved), 100 * moved[int(0.95 * len(moved))]) in page


def test_the_reports_comparison_over_the_orders_is_that_of_the_summary() -> None:
    results = gather([ROOT / "results" / "long-smollm2"]).results
    expected, groups = summarise(results)["long_sequence"]["smollm2-135m"], group_runs(results)

    def label(shown: str) -> str:
        """The summary names what a preset was changed to, the report what groups differ in."""
        named = re.sub(r" \((.*)\)", r", \1", shown)
        return named.replace(", eviction pca", "").replace(", prompt_length 10", "")

    found = {
        (label(pair.first), label(pair.second)): (pair.difference, pair.p)
        for pair in compare(groups)
        if pair.where == "mean of 3 streams, smollm2-135m"
    }
    for method in set(expected) - {CONTROL, TWENTY}:  # the latter has a length of its own
        wanted = expected[method]["minus_length_matched"]
        sign = 1 if (method, CONTROL) in found else -1
        difference, p = found[(method, CONTROL)[::sign]]
        assert (sign * difference, p) == pytest.approx((wanted["mean"], wanted["p"]), abs=1e-5)


def seeds_of(own: dict[tuple[str, int], dict], orders: tuple[str, ...]) -> list[float]:
    """Average scores in percent, over some orders, seeds 0 to 2."""
    return [100 * mean(own[o, seed]["average_score"] for o in orders) for seed in range(3)]


def told(scores: list[float]) -> str:
    """Mean, spread and every seed, as cells."""
    return f"{mean(scores):.1f} ± {stdev(scores):.1f} | {', '.join(f'{s:.1f}' for s in scores)}"


def test_the_findings_on_the_short_sequence_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    claims = (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")
    orders = ("order-01", "order-02", "order-03")
    runs = {m.removesuffix(", shots 16"): own for m, own in records_in("short-smollm2").items()}
    assert {len(own) for own in runs.values()} == {9}
    seeds = {method: seeds_of(own, orders) for method, own in runs.items()}
    lines = []
    for method, found in sorted(seeds.items(), key=lambda each: -mean(each[1])):
        minus = mean(found) - mean(seeds[CONTROL])
        lines.append(f"| `{method}` | {told(found)} | {f'{minus:+.1f} ' if minus else ''}|")
    assert between(page, "short") == lines
    for method, own in runs.items():
        for record in own.values() if method != "prompt-tuning" else ():
            assert record["backward_transfer"] == 0
            assert all(task["unchanged"] for task in record["tasks"].values())
    for other, said in (
        ("prog-prompt", "{:.1f} above ProgPrompt on all three seeds"),
        ("per-task-prompt", "{:.1f} above a per-task prompt of 10 vectors"),
        (CONTROL, "{:.1f} below the control on all three"),
    ):
        differences = [a - b for a, b in zip(seeds["q-tuning"], seeds[other], strict=True)]
        if "all three" in said:
            assert len({each > 0 for each in differences}) == 1
        assert said.format(abs(mean(differences))) in page
    twins = []
    for key, record in runs["q-tuning-plus"].items():
        assert all(task["source"] is None for task in record["tasks"].values())
        twins.append(abs(record["average_score"] - runs[CONTROL][key]["average_score"]))
    assert sum(each == 0 for each in twins) == 5
    assert f"they differ by up to {100 * max(twins):.1f}\npoints" in page
    cells = [f"{mean(seeds[m]):.1f} ± {stdev(seeds[m]):.1f}" for m in ("q-tuning", "prog-prompt")]
    assert "{}, ProgPrompt {}".format(*cells) in claims


def test_the_findings_on_trained_weights_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    words = " ".join(page.split())
    weights = records_in("finetuning-smollm2")
    nine = {**records_in("long-smollm2"), **weights}
    one = {
        label.removesuffix(", shots 16"): own
        for label, own in {**records_in("short-smollm2"), **weights}.items()
        if label.endswith(", shots 16")
    }
    long, short = (
        {method: seeds_of(own, (order,)) for method, own in runs.items() if (order, 0) in own}
        for runs, order in ((nine, "order-09"), (one, "order-01"))
    )
    methods = sorted(set(long) & set(short), key=lambda method: -mean(long[method]))
    assert len(methods) == 10

    def lost(own: dict[tuple[str, int], dict], order: str) -> str:
        found = [own[order, seed]["backward_transfer"] for seed in range(3)]
        return "" if None in found else f"{100 * mean(found):.1f}"

    assert between(page, "weights") == [
        f"| `{m}`{' (control)' if m == CONTROL else ''} | {told(long[m])} | {lost(nine[m], 'order-09')} "
        f"| {told(short[m])} | {lost(one[m], 'order-01')} |"
        for m in methods
    ]
    best = "per-task-finetune"
    far = [
        mean(scores[best]) - mean(scores[other])
        for scores, other in ((long, CONTROL), (long, "q-tuning-plus"), (short, CONTROL))
    ]
    said = (
        "{:.1f} points above the control (`per-task-prompt-long`) and {:.1f} above `q-tuning-plus` on order 9, "
        "{:.1f} above both on order 1"
    )
    assert said.format(*far) in words
    assert mean(short[CONTROL]) == pytest.approx(mean(short["q-tuning-plus"]))
    for scores, other in ((long, CONTROL), (long, "q-tuning-plus"), (short, CONTROL)):
        assert all(a > b for a, b in zip(scores[best], scores[other], strict=True))

    def ahead(task: str) -> float:
        own, other = (
            mean(nine[method]["order-09", seed]["tasks"][task]["score"] for seed in range(3))
            for method in (best, "q-tuning-plus")
        )
        return 100 * (own - other)

    assert f"`cb` ({ahead('cb'):.1f} points)" in words
    parts = [
        100 * (mean(own[:3]) - mean(own[3:]))
        for part in ("accuracy", "macro-f1")
        for own in [
            [
                nine[m]["order-09", s]["tasks"]["cb"]["metrics"][part]
                for m in (best, "q-tuning-plus")
                for s in range(3)
            ]
        ]
    ]
    assert "accuracy (+{:.1f}) and macro-F1 (+{:.1f})".format(*parts) in words
    rows = nine[best]["order-09", 0]["tasks"]
    assert [rows["cb"]["split"][part] for part in ("train", "test")] == [250, 28]
    assert f"with {rows['copa']['split']['test']} test texts" in words
    copa = mean(nine[best]["order-09", seed]["tasks"]["copa"]["score"] for seed in range(3))
    assert copa == pytest.approx(rows["copa"]["majority"])
    assert (
        f"without it the difference is {(far[1] - ahead('cb') / 15) * 15 / 14:.1f} points" in words
    )
    assert 0.4 < ahead("cb") / 15 / far[1] < 0.6  # half of it
    gains = [ahead(task) for task in ("qqp", "copa", "yelp", "amazon")]
    assert f"gain {min(gains):.1f} to {max(gains):.1f} points" in words
    assert f"`multirc` is {-ahead('multirc'):.1f} lower" in words
    on_and_on = nine["continual-finetune"]
    fell = [
        100 * mean(on_and_on["order-09", seed]["tasks"]["cb"][key] for seed in range(3))
        for key in ("when_learnt", "score")
    ]
    assert "`cb` falls from {:.0f} to {:.0f} %".format(*fell) in words
    gone = [lost(nine["continual-finetune"], "order-09"), lost(one["continual-finetune"], "order-01")]  # fmt: skip
    said = "lose {} points each on average on order 9 and {} on order 1"
    assert said.format(*(each.removeprefix("-") for each in gone)) in words
    falls = [
        (
            100 * mean(t["when_learnt"] for s in range(3) for t in own[order, s]["tasks"].values()),
            mean(scores["continual-finetune"]),
        )
        for own, order, scores in (
            (on_and_on, "order-09", long),
            (one["continual-finetune"], "order-01", short),
        )
    ]
    said = "falls from {:.1f} to {:.1f}, and from {:.1f} to {:.1f})"
    assert said.format(*falls[0], *falls[1]) in words
    kept = [m for m in methods if "prompt" in m or m.startswith("q-")]
    below = {
        (m, order)
        for order, scores in (("order-09", long), ("order-01", short))
        for m in kept
        if mean(scores[m]) < mean(scores["continual-finetune"]) and m != "prompt-tuning"
    }
    assert below == {("prog-prompt", "order-09")}
    joint = seeds_of(weights["multi-task"], ORDERS)
    spread, each = told(joint).split(" | ")
    assert f"All tasks at once: {spread} on orders 8 to 10 ({each})" in words
    same = [mean(seeds_of(nine[m], ORDERS)) for m in ("q-tuning-plus", CONTROL)]
    assert "`q-tuning-plus` has {:.1f} and the control {:.1f}".format(*same) in words
    assert mean(joint) - min(same) < 1
    far = [mean(s[best]) - mean(s["multi-task"]) for s in (long, short)]
    said = "{:.1f} below a model per task on order 9 (on all three seeds) and {:.1f} on order 1 (on two)"
    assert said.format(*far) in words
    claims = (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")

    def cell(scores: list[float]) -> str:
        return told(scores).split(" | ")[0]

    whole = seed_means(nine["q-tuning"])
    said = f"orders 8–10: {cell(whole)} against {cell(joint)}; `q-tuning-plus` on the same seeds {same[0]:.1f} |"
    assert said in claims
    said = (
        f"{cell(long[best])} on order 9, where all at once has {cell(long['multi-task'])} "
        f"and Q-tuning {mean(long['q-tuning']):.1f} |"
    )
    assert said in claims
    lines = [
        f"{cell(scores['continual-finetune'])}, {more}−{each.removeprefix('-')} ({order})"
        for scores, each, more, order in (
            (long, gone[0], "backward transfer ", "order 9"),
            (short, gone[1], "", "order 1"),
        )
    ]
    assert "; ".join(lines) in claims
    far = f"{mean(short['q-tuning']):.1f} against {mean(short[best]):.1f}"
    assert f"fine-tuning a model per task: no, on order 1 {far} |" in claims
    spent = minutes([record for own in weights.values() for record in own.values()])
    assert f"{spent:.1f} minutes for the 24 finished runs" in claims
    tuned = json.loads((ROOT / "results" / "tuning-smollm2-weights.json").read_text())
    count = sum(len(each["scores"]) for tried in tuned["methods"].values() for each in tried)
    assert f"ten {minutes([tuned]):.1f} for the {count} candidates" in " ".join(claims.split())
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    figures = (
        f"it ends at {falls[0][1]:.1f} on order 9, {falls[0][0] - falls[0][1]:.1f} points below what the tasks "
        f"had when learnt, and `q-tuning-plus` has {mean(long['q-tuning-plus']):.1f} there",
        f"have {mean(joint):.1f} on the three orders, half a point above `q-tuning-plus`",
        f"is best, {mean(long[best]):.1f} on order 9",
    )
    assert all(each in readme for each in figures)
    assert 0.4 < mean(joint) - same[0] < 0.6


def test_what_the_findings_say_in_short_is_what_they_say() -> None:
    """Every figure of the summary stands in the sections, where it is compared with the records."""
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    short, rest = page.split("## In short\n")[1].split("## A long prompt of its own", 1)
    words = " ".join(rest.split())
    for figure, said in (
        ("4.4 points on fifteen tasks", "Q-tuning is 4.4 points above ProgPrompt on all six seeds"),
        ("2.7 on four", "Q-tuning is 2.7 above ProgPrompt on all three seeds"),
        ("level with short ones", "It is level with a per-task prompt of 10 vectors"),
        ("2.4 below equally long ones", "is 2.4 above Q-tuning on all six seeds"),
        ("`sst2`, by 6.9 points", "| `sst2` | 18 of 18 | 6.9 |"),
        (
            "0.4 above the control (p = 0.06)",
            "is 0.4 above the control, on five of six seeds (p = 0.06)",
        ),
        ("3.5 above `q-tuning-plus` on order 9", "3.5 above `q-tuning-plus` on order 9"),
        ("61.2 where `q-tuning-plus` has 60.7", "With the same seeds `q-tuning-plus` has 60.7"),
        ("from 61.4 to 54.4", "falls from 61.4 to 54.4"),
    ):
        assert figure in short
        assert said in words, said


PARTS = {
    "retention none": "without retention",
    "retention none, scale false, shared_length 0": "without all three: the queue alone",
    "scale false": "without the scale",
    "": "a queue of 5 (the preset)",
    "queue_size 10": "a queue of 10",
    "shared_length 0": "without the shared prefix, and so without retention",
    "eviction none": "all prompts are kept",
    "memory_factor 0.001": "retention's weight 0.001",
    "memory_factor 0.1": "retention's weight 0.1",
}


def test_the_findings_on_parts_of_q_tuning_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    claims = (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")
    found = records_in("ablations-smollm2")
    runs = {label.removeprefix("q-tuning, "): own for label, own in found.items()}
    runs[""] = {key: r for key, r in records_in("long-smollm2")["q-tuning"].items() if key[1] < 3}
    assert set(runs) == set(PARTS)
    expected = {}
    for part, own in runs.items():
        orders = ORDERS if len(own) == 9 else ("order-09",)
        found, plain = seeds_of(own, orders), seeds_of(runs[""], orders)
        last = 100 * mean(
            task["when_learnt"]
            for (order, _), record in own.items()
            if order == "order-09"
            for task in list(record["tasks"].values())[-5:]
        )
        late, usual = (
            100
            * mean(
                task["when_learnt"]
                for (order, _), record in each.items()
                if order in orders
                for task in list(record["tasks"].values())[5:]
            )
            for each in (own, runs[""])
        )
        where = "8 to 10" if len(own) == 9 else "9"
        minus = f"{mean(found) - mean(plain):+.1f} | {late - usual:+.1f} " if part else "| "
        line = f"| {PARTS[part]} | {where} | {told(found)} | {minus}| {last:.1f} |"
        expected[line] = (-len(orders), -mean(found))
        assert f"{mean(found):.1f}" in claims
        for record in own.values():
            assert record["backward_transfer"] == 0
            assert all(task["unchanged"] for task in record["tasks"].values())
    assert between(page, "parts") == sorted(expected, key=expected.get)
    control = mean(seeds_of(records_in("long-smollm2")[CONTROL], ORDERS))
    assert f"None of them reaches the control ({control:.1f} on these seeds)" in page
    whole = [-key[1] for key in expected.values() if key[0] == -3]
    assert f"orders 8 to 10 lie within {max(whole) - min(whole):.1f} points" in page
    size = [mean(seeds_of(runs[part], ORDERS)) for part in ("", "queue_size 10", "eviction none")]
    assert "{:.1f}, {:.1f} and {:.1f} with 5, 10 and all prompts".format(*size) in page
    above = size[2] - mean(seeds_of(records_in("long-smollm2")["prog-prompt"], ORDERS))
    assert f"{above:.1f} points above it here" in page
    first = [
        100 * mean(t["score"] for r in own.values() for t in list(r["tasks"].values())[:5])
        for own in (runs[""], runs["retention none"], runs["queue_size 10"], runs["eviction none"])
    ]
    assert f"have {first[0]:.1f} in the preset's pack and {first[1]:.1f} in this one" in page
    assert first[1] == first[2] == first[3]
    weights = ("memory_factor 0.001", "", "memory_factor 0.1", "retention none")
    nine = [mean(seeds_of(runs[part], ("order-09",))) for part in weights]
    said = "has {:.1f}, {:.1f} and {:.1f}, and no retention {:.1f}: 0.01 is the best weight"
    assert said.format(*nine) in page
    same = [
        100 * mean(t["score"] for s in range(3) for t in list(runs[part]["order-09", s]["tasks"].values())[:5])
        for part in ("memory_factor 0.001", "memory_factor 0.1", "retention none", "queue_size 10")
    ]  # fmt: skip
    assert f"have {same[0]:.1f} on order 9" in page
    assert f"run so far {same[2]:.1f}." in " ".join(page.split())
    assert same[0] == same[1]
    assert same[2] == same[3]
    for seed in range(3):
        last, usual = (
            mean(t["when_learnt"] for t in list(own["order-09", seed]["tasks"].values())[-5:])
            for own in (runs["eviction none"], runs[""])
        )
        assert last < usual


def test_the_findings_on_shots_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    claims = (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")
    runs, few = records_in("shots-smollm2"), records_in("long-smollm2")
    lines = []
    for method in (CONTROL, "q-tuning", "prog-prompt"):
        each = [few[method], *(runs[f"{method}, shots {n}"] for n in (200, 1000))]
        scores = [seeds_of(own, ("order-09",)) for own in each]
        cells = [f"{mean(s):.1f} ± {stdev(s):.1f} ({', '.join(f'{x:.1f}' for x in s)})" for s in scores]  # fmt: skip
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
        assert ", ".join(f"{mean(own):.1f}" for own in scores) in claims
        for record in (record for own in each[1:] for record in own.values()):
            assert record["backward_transfer"] == 0
    assert between(page, "shots") == lines
    gaps = [
        mean(seeds_of(own, ("order-09",))) - mean(seeds_of(its, ("order-09",)))
        for own, its in (
            (few[CONTROL], few["q-tuning"]),
            *((runs[f"{CONTROL}, shots {n}"], runs[f"q-tuning, shots {n}"]) for n in (200, 1000)),
        )
    ]
    assert "Q-tuning is {:.1f}, {:.1f} and {:.1f} points".format(*gaps) in page


def test_the_findings_on_encoders_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    words, claims = " ".join(page.split()), (ROOT / "REPRODUCIBILITY.md").read_text()
    seeds: dict[str, dict[str, list[float]]] = {}
    lost = []
    for model in ("minilm", "bge-small"):
        for label, own in records_in("long-encoders", model).items():
            method = label.split(",")[0]
            seeds.setdefault(method, {})[model] = seeds_of(own, ORDERS)
            if method == "prompt-tuning":
                lost.append(100 * mean(record["backward_transfer"] for record in own.values()))
                continue
            assert {record["backward_transfer"] for record in own.values()} == {0}
            assert all(task["unchanged"] for r in own.values() for task in r["tasks"].values())
    in_order = sorted(seeds.items(), key=lambda each: -mean(each[1]["minilm"]))
    assert between(page, "long-encoders") == [
        f"| `{method}` | {told(own['minilm'])} | {told(own['bge-small'])} |"
        for method, own in in_order
    ]
    assert "({:.1f} on MiniLM, {:.1f} on BGE-small)".format(*lost) in words
    for model, others in (
        ("minilm", {"per-task-prompt": 3, CONTROL: 2, "prog-prompt": 0}),
        ("bge-small", {"per-task-prompt": 3, CONTROL: 2, "prog-prompt": 1}),
    ):
        own = seeds["q-tuning"][model]
        for other, below in others.items():
            pairs = zip(own, seeds[other][model], strict=True)
            assert sum(a < b for a, b in pairs) == below, (model, other)
    gaps = [
        abs(mean(seeds[other][model]) - mean(seeds["q-tuning"][model]))
        for other in ("per-task-prompt", CONTROL, "prog-prompt")
        for model in ("minilm", "bge-small")
    ]
    said = (
        "{:.1f} and {:.1f} points below `per-task-prompt` (on all three seeds of both), {:.1f} and {:.1f} below "
        "`per-task-prompt-long` (on two of three) and {:.1f} and {:.1f} above `prog-prompt`"
    )
    assert said.format(*gaps) in words
    cells = [
        f"{mean(seeds[m][model]):.1f}"
        for model in ("minilm", "bge-small")
        for m in ("q-tuning", "prog-prompt", "per-task-prompt")
    ]
    shared = [
        mean(seeds["q-tuning"][model]) - mean(seeds["shared-prompt"][model])
        for model in ("minilm", "bge-small")
    ]
    assert {f"{each:.1f}" for each in shared} == {"0.2"}
    assert "level with the shared prompt (0.2 above on both)" in words
    said = "all-MiniLM-L6-v2: {}, ProgPrompt {}, per-task prompt {}; BGE-small: {}, {}, {}"
    assert said.format(*cells) in claims
    findings = " ".join((ROOT / "docs" / "findings.md").read_text(encoding="utf-8").split())
    cells = [
        f"{mean(seeds[m][model]):.1f}"
        for m, model in (
            (CONTROL, "minilm"),
            ("per-task-prompt", "minilm"),
            (CONTROL, "bge-small"),
            ("per-task-prompt", "bge-small"),
            ("q-tuning", "minilm"),
            ("q-tuning", "bge-small"),
        )
    ]
    said = "have {} and {} on all-MiniLM-L6-v2, {} and {} on BGE-small, and Q-tuning {} and {}"
    assert said.format(*cells) in findings
    probe = seeds["linear-probe"]
    said = (
        "has {:.1f} and {:.1f}: on BGE-small, on which nothing was tuned, it is above every prompt"
    )
    assert said.format(mean(probe["minilm"]), mean(probe["bge-small"])) in findings
    assert f"a linear probe has {mean(probe['bge-small']):.1f} |" in claims
    for method, own in seeds.items():
        if method != "linear-probe":
            assert all(a < b for a, b in zip(own["bge-small"], probe["bge-small"], strict=True))


def test_the_short_sequence_on_encoders_is_that_of_the_records() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    words, claims = " ".join(page.split()), (ROOT / "REPRODUCIBILITY.md").read_text()
    orders = ("order-04", "order-05", "order-06", "order-07")
    runs, seeds, lost = {}, {}, []
    for model in ("minilm", "bge-small"):
        found = records_in("short-encoders", model)
        runs[model] = {label.split(",")[0]: own for label, own in found.items()}
        assert {len(own) for own in runs[model].values()} == {12}
        seeds[model] = {method: seeds_of(own, orders) for method, own in runs[model].items()}
        for method, own in runs[model].items():
            if method == "prompt-tuning":
                lost.append(-100 * mean(record["backward_transfer"] for record in own.values()))
                continue
            assert {record["backward_transfer"] for record in own.values()} == {0}
            assert all(task["unchanged"] for r in own.values() for task in r["tasks"].values())
    mini, bge = seeds["minilm"], seeds["bge-small"]
    in_order = sorted(mini, key=lambda method: -mean(mini[method]))
    first = {method: mean(seeds_of(runs["minilm"][method], orders[:1])) for method in in_order}
    assert between(page, "short-encoders") == [
        f"| `{method}` | {told(mini[method])} | {first[method]:.1f} | {told(bge[method])} |"
        for method in in_order
    ]
    assert "loses {:.1f} points on MiniLM and {:.1f} on BGE-small".format(*lost) in words
    prompts = in_order[:5]
    assert not {"prompt-tuning", "linear-probe"} & set(prompts)
    apart = {
        model: max(mean(seeds[model][m]) for m in own) - min(mean(seeds[model][m]) for m in own)
        for model, own in (("minilm", prompts), ("bge-small", prompts[1:]))
    }
    assert prompts[0] == "q-tuning"
    assert {f"{each:.1f}" for each in apart.values()} == {"0.3"}
    assert (
        "within 0.3 points of each other; on BGE-small, on which nothing was tuned, four" in words
    )
    below = [mean(bge[other]) - mean(bge["q-tuning"]) for other in ("per-task-prompt", CONTROL)]
    said = "Q-tuning is {:.1f} below `per-task-prompt` and {:.1f} below `per-task-prompt-long`, on all three seeds"
    assert said.format(*below) in words
    for other in ("per-task-prompt", CONTROL):
        assert all(a < b for a, b in zip(bge["q-tuning"], bge[other], strict=True))
    far = mean(mini["q-tuning"]) - mean(mini["linear-probe"])
    assert f"The linear probe is {far:.1f} below Q-tuning on MiniLM" in words
    kept = [first[method] for method in prompts]
    assert f"a prompt for every task have {min(kept):.1f} to {max(kept):.1f}" in words
    cells = [
        f"{mean(own[m]):.1f} ± {stdev(own[m]):.1f}"
        for own in (mini, bge)
        for m in ("q-tuning", "prog-prompt")
    ]
    assert "orders 4–7: {}, ProgPrompt {}".format(*cells[:2]) in claims
    assert "BGE-small: {}, ProgPrompt {}".format(*cells[2:]) in claims


def test_where_no_earlier_task_helped_plus_is_the_control() -> None:
    """To the last bit; where one did, the findings have the difference."""
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    runs = records_in("long-smollm2")
    gains: dict[str, list[float]] = {}
    for key, record in runs["q-tuning-plus"].items():
        for task, own in record["tasks"].items():
            gain = own["score"] - runs[CONTROL][key]["tasks"][task]["score"]
            if own["source"] is None:
                assert gain == 0
            else:
                gains.setdefault(task, []).append(100 * gain)
    assert f"the {sum(map(len, gains.values()))} of 270 tasks" in page
    opinions, others = [], []
    for key, record in runs["q-tuning-plus"].items():
        own, source = record["tasks"]["sst2"], record["tasks"]["sst2"]["source"]
        gain = 100 * (own["score"] - runs[CONTROL][key]["tasks"]["sst2"]["score"])
        (opinions if source in ("imdb", "yelp", "amazon") else others).append(gain)
    words = " ".join(page.split())
    said = "is worth {:.1f} points ({} runs), one from `cb` or `mnli` {:.1f} ({} runs)"
    assert said.format(mean(opinions), len(opinions), mean(others), len(others)) in words
    cost = sum(sum(found) for task, found in gains.items() if task != "sst2") / -270
    count = sum(len(found) for task, found in gains.items() if task != "sst2")
    said = "which brings {:.2f} points; the other {} starts together cost {:.2f}"
    assert said.format(sum(gains["sst2"]) / 270, count, cost) in words
    better = sum(sum(found) for found in gains.values() if mean(found) > 0) / 270
    assert f"it would be {better:.1f} points" in page
    alone, started = (
        sorted(record["tasks"]["sst2"]["score"] for record in runs[method].values())
        for method in (CONTROL, "q-tuning-plus")
    )
    assert f"five end between\n{100 * alone[0]:.0f} and {100 * alone[4]:.0f} %" in page
    assert f"the others at {100 * min(alone[5], started[0]):.1f} or more" in page
    shown = between(page, "starts")
    assert len(shown) == len(gains)
    for task, found in gains.items():
        assert f"| `{task}` | {len(found)} of 18 | {mean(found):.1f} |" in shown


def test_the_findings_on_nine_tasks_are_those_of_the_scores() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    runs = json.loads((ROOT / "results" / "long-smollm2-nine.json").read_text())["scores"]
    seeds = {
        method: [
            100 * mean(mean(own[s].values()) for own in orders.values()) for s in orders["order-08"]
        ]
        for method, orders in runs.items()
    }
    pca, random, fifo, none = (
        seeds[f"q-tuning{rule}"][:3]
        for rule in ("", ", eviction random", ", eviction fifo", ", vocabulary queue")
    )
    words = " ".join(page.split())
    assert f"had {mean(fifo):.1f} (first-in-first-out) and {mean(random):.1f} (random;" in words
    assert f"below the {mean(pca):.1f} that principal components have in these runs" in words
    assert f"{mean(pca):.1f}\n  against {mean(none):.1f} on the first nine tasks" in page
    short = 100 * mean(
        task["when_learnt"]
        for (_, seed), record in records_in("long-smollm2")["per-task-prompt"].items()
        if seed < 3
        for task in list(record["tasks"].values())[:9]
    )
    assert f"a prompt of 10 has {short:.1f} there" in page
    eleven = json.loads((ROOT / "results" / "long-smollm2-eleven.json").read_text())["scores"]
    before = [
        100 * mean(mean(own.values()) for seeds in eleven[m].values() for own in seeds.values())
        for m in ("q-tuning-plus", CONTROL)
    ]
    assert (
        "{:.1f} against {:.1f} for the control on their first eleven tasks".format(*before) in page
    )
    frozen = json.loads((ROOT / "results" / "frozen-rows-smollm2.json").read_text())
    without, some, many = (mean(own) for own in frozen["scores_by_frozen_rows"].values())
    said = f"{100 * without:.1f} without them, {100 * some:.1f} after 40 of them, {100 * many:.1f} after 90"
    assert said in page


def vectors_trained(method: str) -> str:
    """For a task, as the tables of 70 tasks have it."""
    known = {"per-task-prompt": "10", TWENTY: "20", "prog-prompt": "10 of 700 at the end"}
    if method.endswith("shared_length 0"):
        return "10 of 50"
    return known.get(method, "20 of 60" if method.split(",")[0] == "q-tuning" else "60")


LIFELONG = ("order-11", "order-12", "order-13")


def test_the_findings_on_seventy_tasks_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    runs = records_in("lifelong-smollm2")
    methods = ("q-tuning", "per-task-prompt", "shared-prompt")
    runs = {method: own for method, own in runs.items() if method in methods}
    assert {method: len(own) for method, own in runs.items()} == dict.fromkeys(methods, 9)
    whole = {method: seeds_of(runs[method], LIFELONG) for method in methods}
    in_order = sorted(methods, key=lambda method: -mean(whole[method]))
    assert between(page, "lifelong") == [
        f"| `{method}` | {vectors_trained(method)} | {told(whole[method])} |" for method in in_order
    ]
    short, shared = (
        [
            100 * abs(record["average_score"] - runs[other][key]["average_score"])
            for key, record in runs["q-tuning"].items()
        ]
        for other in methods[1:]
    )
    for key, record in runs["q-tuning"].items():
        low, high = (runs[other][key]["average_score"] for other in methods[1:])
        assert low < record["average_score"] < high
    said = "{:.1f} points above per-task prompts and {:.1f} below the shared prompt, each in all nine pairs of runs"
    assert said.format(mean(short), mean(shared)) in page
    said = "({:.1f} to {:.1f}, {:.1f} to {:.1f})"
    assert said.format(min(short), max(short), min(shared), max(shared)) in page
    every = [record for own in runs.values() for record in own.values()]
    assert {record["backward_transfer"] for record in every} == {0}
    tasks = [task for record in every for task in record["tasks"].values()]
    assert all(task["unchanged"] for task in tasks)
    assert f"the answers of all {len(tasks):,} learnt tasks" in page
    claim = (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")
    said = "({} lanes, 70 tasks, nothing else on the card) took {:.1f} minutes"
    assert said.format(len(every), minutes(every)) in claim
    alone, others = [], []
    for method, own in records_in("lifelong-smollm2").items():
        if method not in methods:
            (alone if method == "prog-prompt" else others).extend(own.values())
    said = "the rest of it ({} lanes) {:.1f} and ProgPrompt's three lanes {:.1f}"
    assert said.format(len(others), minutes(others), minutes(alone)) in claim
    bge, *short = (
        [r for label, own in found.items() if "linear-probe" not in label for r in own.values()]
        for found in (
            records_in("long-encoders", "bge-small"),
            records_in("short-encoders", "minilm"),
            records_in("short-encoders", "bge-small"),
        )
    )
    words = " ".join(claim.split())
    assert f"on BGE-small ({len(bge)} lanes) {minutes(bge):.1f}," in words
    assert len(short[0]) == len(short[1])
    both = f"{minutes(short[0]):.1f} and on BGE-small {minutes(short[1]):.1f},"
    assert f"on MiniLM ({len(short[0])} lanes) {both}" in words
    costs = [record["costs"] for record in every]
    seconds = [cost["seconds"] for cost in costs[0]]
    assert all([cost["seconds"] for cost in each] == seconds for each in costs)  # a pack's
    said = "{:.2f} seconds of a run for tasks 2 to 35, {:.2f} for tasks 36 to 70"
    flat = said.format(mean(seconds[1:35]), mean(seconds[35:]))
    assert flat in page
    assert flat in claim
    half = [slice(1, 35), slice(35, 70)]
    intents = [
        mean(
            task["seconds"]
            for record in every
            for name, task in list(record["tasks"].items())[part]
            if name.startswith("banking77")
        )
        for part in half
    ]
    assert "intents of `banking77`, {:.2f} and {:.2f}.".format(*intents) in page
    (held,) = {cost["card_bytes"] for each in costs for cost in each}
    assert f"({held:,} bytes after every task)" in " ".join(page.split())
    first, last = (costs[0][i]["resident_bytes"] / 1e9 for i in (0, -1))
    assert f"grew from {first:.1f} to {last:.1f} GB" in page
    earlier = json.loads((ROOT / "results" / "lifelong-smollm2-69.json").read_text())["scores"]
    before, now, moved = [], [], []
    for method in methods:
        pairs = [
            (
                100 * mean(was.values()),
                100 * mean(runs[method][o, int(s)]["tasks"][task]["when_learnt"] for task in was),
            )
            for o, seeds in earlier[method].items()
            for s, was in seeds.items()
        ]
        before.append(mean(was for was, _ in pairs))
        now.append(mean(own for _, own in pairs))
        moved += [abs(was - own) for was, own in pairs]
    assert "had {:.1f}, {:.1f} and {:.1f} (Q-tuning, per-task, shared)".format(*before) in page
    assert "this one {:.1f}, {:.1f} and {:.1f}; single runs".format(*now) in page
    assert f"differ by up to {max(moved):.1f}." in page
    above = {
        other: sum(
            mean(own.values()) > mean(earlier[other][o][s].values())
            for o, seeds in earlier["q-tuning"].items()
            for s, own in seeds.items()
        )
        for other in methods[1:]
    }
    assert above == {"per-task-prompt": 8, "shared-prompt": 0}  # said in words
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    means = [mean(whole[method]) for method in methods]
    said = "{:.1f} % with Q-tuning, {:.1f} with a short prompt per task. But a long prompt shared by all has {:.1f}"
    assert said.format(*means) in readme
    assert f"| {', '.join(f'{mean(whole[m]):.1f} ± {stdev(whole[m]):.1f}' for m in methods)} |" in claim  # fmt: skip


def test_the_findings_on_parts_of_q_tuning_in_seventy_tasks_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    words = " ".join(page.split())
    runs = records_in("lifelong-smollm2")
    kinds = ("banking77", "dbpedia-14", "yahoo", "emotion", "others")
    alone = "q-tuning, retention none, scale false, shared_length 0"

    def kind(task: str) -> str:
        return next((each for each in kinds if task.startswith(f"{each}-")), "others")

    expected, seeds = {}, {}
    for method, own in runs.items():
        tasks = [list(own["order-11", seed]["tasks"].items()) for seed in range(3)]
        assert {len(each) for each in tasks} == {70}
        assert {record["backward_transfer"] for record in own.values()} == {0}
        assert all(task["unchanged"] for each in tasks for _, task in each)
        seeds[method] = seeds_of(own, ("order-11",))
        every = [(name, task["score"]) for each in tasks for name, task in each]
        assert sum(kind(name) == "others" for name, _ in every) == 3 * 17
        parts = [100 * mean(s for name, s in every if kind(name) == which) for which in kinds]
        name = re.sub(r"^[\w-]+", lambda found: f"`{found[0]}`", method)
        cells = [
            name + " (control)" * (method == CONTROL),
            vectors_trained(method),
            told(seeds[method]),
            *(f"{part:.1f}" for part in parts),
        ]
        expected[f"| {' | '.join(cells)} |"] = -mean(seeds[method])
    assert between(page, "lifelong-parts") == sorted(expected, key=expected.get)
    means = {method: mean(own) for method, own in seeds.items()}

    def differences(one: str, other: str) -> list[float]:
        return [a - b for a, b in zip(seeds[one], seeds[other], strict=True)]

    scaled, prefixed = "q-tuning, retention none", "q-tuning, retention none, scale false"
    assert min(differences("per-task-prompt", alone)) > 0
    assert sum(each > 0 for each in differences(prefixed, alone)) == 2
    earlier = json.loads((ROOT / "results" / "lifelong-smollm2-69.json").read_text())["scores"]
    before = {
        method: 100 * mean(mean(own.values()) for own in orders["order-11"].values())
        for method, orders in earlier.items()
    }
    steps = ("per-task-prompt", alone, prefixed, scaled, "q-tuning")
    was = [f"{before[b] - before[a]:+.1f}" for a, b in itertools.pairwise(steps)]
    was_scale = [
        100 * (mean(one.values()) - mean(other.values()))
        for one, other in zip(
            earlier[scaled]["order-11"].values(),
            earlier[prefixed]["order-11"].values(),
            strict=True,
        )
    ]
    ahead = differences("q-tuning", TWENTY)
    was_ahead = [
        100 * mean(own[n] - runs[TWENTY]["order-11", int(s)]["tasks"][n]["score"] for n in own)
        for s, own in earlier["q-tuning"]["order-11"].items()
    ]

    def each(numbers: list[float]) -> str:
        return ", ".join(f"{number:.1f}" for number in numbers)

    def fell(tasks: list[str]) -> float:
        """Of ProgPrompt against a short prompt per task."""
        return 100 * mean(
            runs["per-task-prompt"][key]["tasks"][n]["score"] - record["tasks"][n]["score"]
            for key, record in runs["prog-prompt"].items()
            for n in tasks
        )

    names = list(runs["prog-prompt"]["order-11", 0]["tasks"])
    intents = [name for name in names if kind(name) == "banking77"]
    tens = [f"{fell(names[i : i + 10]):.1f}" for i in range(0, 70, 10)]
    seconds = [cost["seconds"] for cost in runs["prog-prompt"]["order-11", 0]["costs"]]
    long = (CONTROL, "shared-prompt", "q-tuning-plus")
    for said in (
        f"it has {means[alone]:.1f}, {means['per-task-prompt'] - means[alone]:.1f} less",
        f"it has {means[prefixed]:.1f} (above on two seeds of three); "
        f"the scale brings {means[scaled] - means[prefixed]:.1f} ({each(differences(scaled, prefixed))})",
        f"retention {means['q-tuning'] - means[scaled]:.1f}, which is nothing",
        "the same steps were {}, {}, {} ({}) and {}.".format(*was[:3], each(was_scale), was[3]),
        f"10 of them {means[alone]:.1f} and {means['per-task-prompt']:.1f}",
        f"20 of them {means[prefixed]:.1f} to {means['q-tuning']:.1f}",
        f"60 of them {means['shared-prompt']:.1f} to {means['q-tuning-plus']:.1f}",
        f"{mean(ahead):.1f} above a per-task prompt without a queue ({each(ahead)})",
        f"with its runs of the earlier pack {mean(was_ahead):.1f}: no difference",
        f"within {max(means[m] for m in long) - min(means[m] for m in long):.1f} points of each other",
        f"by {', '.join(tens[:-1])} and {tens[-1]} points on each ten of them",
        f"{fell(intents[:10]):.1f} below on the first ten and {fell(intents[29:]):.1f} on the last nine",
        f"{mean(seconds[1:35]):.2f} seconds of a run for tasks 2 to 35 and {mean(seconds[35:]):.2f} for tasks 36 to 70",
        f"On the 70 tasks of order 11 it is {means['q-tuning-plus'] - means[CONTROL]:.1f} above",
    ):  # fmt: skip
        assert said in words
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = "a long prompt per task has {:.1f} against {:.1f}"
    assert said.format(means[CONTROL], means["q-tuning"]) in readme
    claims = (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")
    told_so = f"{means['prog-prompt']:.1f} ± {stdev(seeds['prog-prompt']):.1f}"
    assert f"all 70 tasks of order 11, SmolLM2-135M with 1,024 positions: {told_so}" in claims


def test_all_seventy_tasks_of_an_encoder_are_answered_as_when_learnt() -> None:
    runs = {label.split(",")[0]: own for label, own in records_in("lifelong-minilm").items()}
    (record,), (other,) = (runs[m].values() for m in ("q-tuning", "per-task-prompt"))
    page = " ".join((ROOT / "docs" / "findings.md").read_text(encoding="utf-8").split())
    tasks = list(record["tasks"].items())
    assert len(tasks) == 70
    assert record["backward_transfer"] == 0
    assert all(task["unchanged"] for _, task in tasks)
    early, late = (
        mean(task["seconds"] for name, task in part if name.startswith("banking77"))
        for part in (tasks[11:40], tasks[40:])
    )
    assert (
        f"took {early:.0f} seconds on average and those among the 41st to the 70th {late:.0f}, but"
        in page
    )
    flat = list(other["tasks"].items())
    early, late = (
        mean(task["seconds"] for name, task in part if name.startswith("banking77"))
        for part in (flat[11:40], flat[40:])
    )
    assert f"whose cost cannot change, {early:.0f} and {late:.0f}." in page
    (held,) = {cost["live_tensor_bytes"] for cost in record["costs"][10:]}
    assert f"live tensors take {held:,} bytes after each task" in page
    first, last = (record["costs"][i]["resident_bytes"] / 1e9 for i in (0, -1))
    assert f"grew from {first:.1f} to {last:.1f} GB" in page
    score = f"{100 * record['average_score']:.1f} %"
    assert f"`): {score}; backward transfer 0.0" in page
    assert f"same settings and seed has {100 * other['average_score']:.1f} %" in page
    said = f"(one order, one seed): {score} with Q-tuning, {100 * other['average_score']:.1f} with a prompt of 5"
    assert said in " ".join((ROOT / "README.md").read_text().split())


def test_the_findings_figures_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
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
    assert step["compiled"] > 0.95 * step["bf16"]
    assert found["versions"]["threads"] == 2
    found = json.loads((ROOT / "perf" / "results" / "weights-smollm2-135m-gpu.json").read_text())
    step, size = found["median_ms"], found["texts"]["mean positions"]
    said = (
        f"8 texts of about {size:.0f} positions: {step['float32']:.0f} ms a step in float32, {step['bf16']:.0f} with "
        f"products in bfloat16, {step['compiled']:.0f} with"
    )
    assert said in page
    half, compiled = (sorted(found["step_ms"][way]) for way in ("bf16", "compiled"))
    spread = f"{half[0]:.0f} to {half[2]:.0f} and {compiled[0]:.0f} to {compiled[2]:.0f} over three"
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
    assert f"{record['ratio']:.1f} times as fast again for {record['lanes']} runs" in readme
    assert f"`{record['command']}`" in page
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


def test_the_findings_on_transfer_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    runs, expected = records_in("long-smollm2"), []
    for method, own in runs.items():
        seeds = sorted({seed for _, seed in own})
        last = [
            100 * mean(t["when_learnt"] for t in list(own["order-09", s]["tasks"].values())[-5:])
            for s in seeds
        ]
        columns = [last, *(seed_means(own, f"{way}_transfer") for way in ("forward", "backward"))]
        name = re.sub(r"^[\w-]+", lambda found: f"`{found[0]}`", method)
        cells = [f"{round(mean(each), 1) + 0.0} ± {stdev(each):.1f}" for each in columns]
        expected.append((-mean(last), f"| {name} | {' | '.join(cells)} |"))
    assert between(page, "transfer") == [line for _, line in sorted(expected)]


@pytest.mark.parametrize("name", ["weights", "memory"])
def test_the_preset_has_the_best_candidate_of_methods_that_train_weights(name: str) -> None:
    tuned = json.loads((ROOT / "results" / f"tuning-smollm2-{name}.json").read_text())
    for method, tried in tuned["methods"].items():
        assert len(tried) == BUDGET
        assert {len(each["scores"]) for each in tried} == {len(tuned["seeds"])}
        best = max(tried, key=lambda each: mean(each["scores"]))["settings"]
        assert get_preset("smollm2", method).items() >= best.items(), method
