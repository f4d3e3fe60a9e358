"""Tables of docs/methods.md, and what is said of them, are those of the records."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from qtuning.report.export import to_markdown
from qtuning.report.gather import gather
from qtuning.report.tables import group_runs
from tests.docs.committed import (
    CONTROL,
    ORDERS,
    ROOT,
    between,
    findings,
    records_in,
    seeds_of,
    told,
)


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
    answers = " ".join(findings().split())
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
    assert said.format(*cells) in answers
    probe = seeds["linear-probe"]
    said = (
        "has {:.1f} and {:.1f}: on BGE-small, on which nothing was tuned, it is above every prompt"
    )
    assert said.format(mean(probe["minilm"]), mean(probe["bge-small"])) in answers
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
