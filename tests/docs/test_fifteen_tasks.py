"""What docs/findings.md says of the short and the long sequence is in the records."""

from __future__ import annotations

import json
import re
from statistics import mean, stdev

import pytest

from qtuning.report.comparing import compare
from qtuning.report.gather import gather
from qtuning.report.tables import group_runs
from qtuning.summary import summarise
from tests.docs.committed import (
    CONTROL,
    ORDERS,
    ROOT,
    TWENTY,
    between,
    findings,
    flip_p,
    records_in,
    seed_means,
    seeds_of,
    told,
)


def test_the_findings_on_the_long_sequence_are_those_of_the_records() -> None:
    page = findings()
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


def test_the_findings_on_the_short_sequence_are_those_of_the_records() -> None:
    page = findings()
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
    page = findings()
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
    page = findings()
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


def test_where_no_earlier_task_helped_plus_is_the_control() -> None:
    """To the last bit; where one did, the findings have the difference."""
    page = findings()
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
    page = findings()
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


def test_the_findings_on_transfer_are_those_of_the_records() -> None:
    page = findings()
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


def test_what_the_findings_say_in_short_is_what_they_say() -> None:
    """Every figure of the summary stands in the sections, where it is compared with the records."""
    page = findings()
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
        ("(59.5 with `replay`", "| `replay` | 59.5 ± 0.3"),
        ("11.0 points above short prompts", "per task Q-tuning is 11.0 points"),
        ("4.4 above equally long ones", "Q-tuning is 4.4 points above a prompt as long"),
        ("`q-tuning-plus` 6.7 above those", "`q-tuning-plus` 6.7 (5.0 to 9.3, all nine)"),
    ):
        assert figure in short
        assert said in words, said


def test_the_findings_on_lfpt5_are_those_of_the_records() -> None:
    """One short order; it never had anything to rehearse."""
    page = " ".join(findings("fifteen-tasks").split())
    order = "order-01"
    labelled = {**records_in("short-smollm2"), **records_in("rehearsal-smollm2")}
    runs = {label.removesuffix(", shots 16"): own for label, own in labelled.items()}
    own = {m: [runs[m][order, seed] for seed in range(3)] for m in runs if (order, 2) in runs[m]}
    vectors = {CONTROL: "60", "q-tuning": "20 of 50", "per-task-prompt": "10",
               "lfpt5": "60, the same for all", "prompt-tuning": "10, the same for all"}  # fmt: skip
    scores = {m: [100 * record["average_score"] for record in own[m]] for m in vectors}
    lost = {m: mean(100 * record["backward_transfer"] for record in own[m]) for m in vectors}
    learnt = {
        m: mean(100 * t["when_learnt"] for record in own[m] for t in record["tasks"].values())
        for m in vectors
    }
    shown = between(findings("fifteen-tasks"), "rehearsal")
    ranked = sorted(vectors, key=lambda m: -mean(scores[m]))
    assert shown == [
        f"| `{m}`{' (control)' if m == CONTROL else ''} | {vectors[m]} | {learnt[m]:.1f} "
        f"| {told(scores[m])} | {lost[m] + 0.0:.1f} |"
        for m in ranked
    ]
    tasks = [task for record in own["lfpt5"] for task in record["tasks"].values()]
    assert {task["prompt_rows"] for task in tasks} == {60}
    assert sum(task["pseudo_samples"] for task in tasks) == 0
    asked = 3 * sum(2 * classes * later for classes, later in ((14, 3), (5, 2), (10, 1)))
    assert f"of the {asked} examples it wrote in three runs none could be read back" in page
