"""What docs/findings.md says of methods that train weights is in the records."""

from __future__ import annotations

import json
from statistics import mean, stdev

import pytest

from qtuning.presets import get_preset
from qtuning.tuning import BUDGET
from tests.docs.committed import (
    CONTROL,
    ORDERS,
    ROOT,
    between,
    findings,
    minutes,
    records_in,
    seed_means,
    seeds_of,
    told,
)


def test_the_findings_on_trained_weights_are_those_of_the_records() -> None:
    page = findings()
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
    assert len(methods) == 13

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
    protected = ("replay", "a-gem", "ewc")
    every = {True: [], False: []}
    for method, own in weights.items():
        every[method.split(",")[0] in protected] += own.values()
    assert f"{minutes(every[False]):.1f} minutes for {len(every[False])} runs" in claims
    assert f"{minutes(every[True]):.1f} for the other {len(every[True])} runs" in claims
    assert len(every[True]) + len(every[False]) == 42
    kept, most, held = (
        [lost(nine[m], "order-09").strip("-"), lost(one[m], "order-01").strip("-")]
        for m in protected
    )
    free = [mean(scores["continual-finetune"]) for scores in (long, short)]
    ours = [mean(scores["q-tuning-plus"]) for scores in (long, short)]
    again, project = ([mean(scores[m]) for scores in (long, short)] for m in protected[:2])
    then = {
        method: [
            100 * mean(t["when_learnt"] for s in range(3) for t in own[order, s]["tasks"].values())
            for own, order in ((nine[method], "order-09"), (one[method], "order-01"))
        ]
        for method in protected
    }
    late = {
        method: 100 * mean(nine[method]["order-09", s]["tasks"]["dbpedia"]["when_learnt"] for s in range(3))
        for method in ("ewc", "continual-finetune")
    }  # fmt: skip
    ahead_by = [a - b for a, b in zip(short["ewc"], short["continual-finetune"], strict=True)]
    assert sum(each > 0 for each in ahead_by) == 2
    for said in (
        f"forgets little ({kept[0]} points on order 9, {kept[1]} on order 1), learns a little less "
        f"({then['replay'][0]:.1f} when learnt against {falls[0][0]:.1f}, and {then['replay'][1]:.1f} against "
        f"{falls[1][0]:.1f}), and ends {again[0] - free[0]:.1f} and {again[1] - free[1]:.1f} points above no "
        f"protection, {ours[0] - again[0]:.1f} and {ours[1] - again[1]:.1f} below `q-tuning-plus`",
        f"no protection on order 9 ({most[0]}) and less on order 1 ({most[1]}), "
        f"where it ends {project[1] - free[1]:.1f} above it",
        f"forgets little on order 9 ({held[0]})",
        f"have {then['ewc'][0]:.1f} when learnt, where one model without protection has {falls[0][0]:.1f}",
        f"(`dbpedia` {late['ewc']:.0f} where no protection has {late['continual-finetune']:.0f})",
        f"On order 1 it loses {held[1]} and ends {mean(ahead_by):.1f} above no protection, on two seeds of three",
    ):
        assert said in words, said
    tuned = json.loads((ROOT / "results" / "tuning-smollm2-weights.json").read_text())
    count = sum(len(each["scores"]) for tried in tuned["methods"].values() for each in tried)
    assert f"ten {minutes([tuned]):.1f} for the {count} candidates" in " ".join(claims.split())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    kept = {
        best: "a whole model, 135 million numbers",
        "multi-task": "all texts of all tasks, to train on at once",
        "q-tuning-plus": "60 vectors, 35 thousand numbers",
        "replay": "a quarter of its texts, beside one model for all",
        "continual-finetune": "nothing, one model for all",
    }
    assert between(readme, "weights-figures") == [
        f"| `{m}` | {mean(long[m]):.1f} ± {stdev(long[m]):.1f} "
        f"| {lost(nine[m], 'order-09').strip('-') or 'not measured'} | {what} |"
        for m, what in kept.items()
    ]
    assert 60 * 576 == 34_560  # numbers of SmolLM2's 60 vectors
    above = [mean(long[best]) - mean(long[method]) for method in ("q-tuning", "q-tuning-plus")]
    assert "{:.1f} points above Q-tuning and {:.1f} above `q-tuning-plus`".format(*above) in readme
    assert 0.4 < mean(joint) - same[0] < 0.6


@pytest.mark.parametrize("name", ["weights", "memory"])
def test_the_preset_has_the_best_candidate_of_methods_that_train_weights(name: str) -> None:
    tuned = json.loads((ROOT / "results" / f"tuning-smollm2-{name}.json").read_text())
    for method, tried in tuned["methods"].items():
        assert len(tried) == BUDGET
        assert {len(each["scores"]) for each in tried} == {len(tuned["seeds"])}
        best = max(tried, key=lambda each: mean(each["scores"]))["settings"]
        assert get_preset("smollm2", method).items() >= best.items(), method
