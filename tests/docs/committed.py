"""What tests of the pages read: committed records, and the tables of a page."""

from __future__ import annotations

import itertools
import json
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import mean, stdev

from qtuning.run_labels import label_of

ROOT = Path(__file__).parents[2]
ORDERS = ("order-08", "order-09", "order-10")
LIFELONG = ("order-11", "order-12", "order-13")
CONTROL = "per-task-prompt-long"
TWENTY = "per-task-prompt, prompt_length 20"
KINDS = ("banking77", "dbpedia-14", "yahoo", "emotion", "others")


def findings(name: str = "*") -> str:
    """The pages of findings, one after another, or one of them."""
    pages = sorted((ROOT / "docs" / "findings").glob(f"{name}.md"))
    if name == "*":
        pages.insert(0, ROOT / "docs" / "findings.md")
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


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


def seeds_of(own: dict[tuple[str, int], dict], orders: tuple[str, ...]) -> list[float]:
    """Average scores in percent, over some orders, seeds 0 to 2."""
    return [100 * mean(own[o, seed]["average_score"] for o in orders) for seed in range(3)]


def between(page: str, name: str) -> list[str]:
    """Lines of a table without its head."""
    inside = page.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
    return inside.strip().splitlines()[2:]


def told(scores: list[float]) -> str:
    """Mean, spread and every seed, as cells."""
    return f"{mean(scores):.1f} ± {stdev(scores):.1f} | {', '.join(f'{s:.1f}' for s in scores)}"


def kind_of(task: str) -> str:
    """Of the 70 tasks: the data set that most of them are parts of."""
    return next((each for each in KINDS if task.startswith(f"{each}-")), "others")


def vectors_trained(method: str) -> str:
    """For a task, as the tables of 70 tasks have it."""
    known = {"per-task-prompt": "10", TWENTY: "20", "prog-prompt": "10 of 700 at the end"}
    if method.endswith("shared_length 0"):
        return "10 of 50"
    return known.get(method, "20 of 60" if method.split(",")[0] == "q-tuning" else "60")
