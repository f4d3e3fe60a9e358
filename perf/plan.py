"""How long the tables take: GPU minutes of every file of tables/ on one H200, before they are run.

A pack's time is its training steps and the rows it is scored on, each times the engine's own figure in
perf/results/speed-*.json. What is assumed stands in REPRODUCIBILITY.md, under the table this script writes there.

Run: python perf/plan.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from summary import RESULTS, fastest_pack, milliseconds

from qtuning.config import MethodSettings, make_settings
from qtuning.runs import run_folder
from qtuning.streams import get_stream, list_tasks, read_yaml
from qtuning.sweep import Pack, expand, read_sweep

ROOT = Path(__file__).parents[1]
FAMILIES = {"t5-large": "seq2seq", "smollm2-135m": "causal"}
"""Models with figures: perf/results/speed-NAME-gpu.json."""
COSTS = ("steps", "rows", "minutes", "minutes_alone")
TIMED = ("q-tuning", "q-tuning-plus", "per-task-prompt", "per-task-prompt-long", "prog-prompt",
         "shared-prompt", "prompt-tuning")  # fmt: skip
# Rows of sets that always train in full (protocol A22). Evaluation rows per class where they are not 500; half of them
# validate. Tokens of a text: mean, and the longest of 24 (three lanes of 8), by SmolLM2's tokenizer on training rows.
TRAIN_ROWS = {"cb": 250, "copa": 400, "wsc": 554}
EVALUATED = {"sst2": 400, "wic": 319, "banking77": 40, "emotion": 287, "cola": 522, "rte": 138, "copa": 50,
             "cb": 19, "wsc": 52, "wnli": 36}  # fmt: skip
TOKENS = {"agnews": (55, 111), "amazon": (94, 211), "banking77": (14, 42), "boolq": (153, 353),
          "cb": (85, 200), "cola": (10, 20), "copa": (32, 41), "dbpedia": (83, 162), "emotion": (20, 49),
          "imdb": (324, 1088), "mnli": (43, 83), "multirc": (372, 602), "qnli": (54, 119),
          "qqp": (33, 70), "rte": (74, 188), "sst2": (11, 35), "wic": (49, 67), "wnli": (40, 81),
          "wsc": (57, 112), "yahoo": (123, 587), "yelp": (172, 626)}  # fmt: skip


def prompt_rows(method: str, s: MethodSettings, number: int) -> int:
    """Prompt vectors before a text of the task with this number, from 1."""
    own = {"prog-prompt": number, "shared-prompt": s.queue_size + 1}
    if method in own or method in ("per-task-prompt", "prompt-tuning"):
        return s.prompt_length * own.get(method, 1)
    full = s.fill_queue or method in ("per-task-prompt-long", "q-tuning-plus")
    held = number if s.eviction == "none" else s.queue_size if full else min(number, s.queue_size)
    return s.shared_length + s.prompt_length * held


def retains(method: str, s: MethodSettings, number: int) -> bool:
    """Whether a step has the second pass of retention: where something was evicted before the task."""
    is_wanted = s.retention != "none" and s.memory_factor > 0 and s.shared_length > 0
    held = 1 if method == "shared-prompt" else s.queue_size
    has_evicted = s.eviction != "none" and number > held
    return method in ("q-tuning", "shared-prompt") and is_wanted and has_evicted


def cost_of(pack: Pack) -> dict[str, float]:
    """Of all its seeds; `minutes_alone` if none of them shared a pass with another."""
    config = pack.config
    record = json.loads((RESULTS / f"speed-{config.model}-gpu.json").read_text())
    method, train = make_settings(FAMILIES[config.model], **config.settings)
    measured = record["tokens_per_step"]
    slower = milliseconds(record, "ours alone, compiled") / fastest_pack(record)
    total = dict.fromkeys(COSTS, 0.0)
    for number, name in enumerate(get_stream(config.stream).tasks, start=1):
        card, labels = list_tasks()[name]
        words = [card.label_words[label] for label in labels]
        is_long = any(len(word) > 12 or not word.isalpha() for word in words)  # many tokens
        half = EVALUATED.get(card.name, 500) // 2 * len(labels)
        validation = min(half, train.validation_limit * len(labels))
        test = min(half, config.test_limit * len(labels)) if config.test_limit else half
        size = TRAIN_ROWS.get(name, train.shots * len(labels))
        epochs = train.epochs_of(size)
        rows = ceil(epochs / train.validate_every) * validation
        rows += 2 * test + number * config.inner_rows
        steps = ceil(size / train.batch_size) * epochs
        prompt = prompt_rows(config.method, method, number)
        mean, longest = (min(prompt + n, config.max_length or 512) for n in TOKENS[card.name])
        figure = fastest_pack(record, retention=retains(config.method, method, number))
        step_ms = steps * figure * train.batch_size * longest / measured
        row = milliseconds(record, "ours row, long answer" if is_long else "ours row")
        row_ms = rows * row * record["batch_size"] * mean / measured
        minutes = ((step_ms + row_ms) / 60_000, (slower * step_ms + row_ms) / 60_000)
        for key, value in zip(COSTS, (steps, rows, *minutes), strict=True):
            total[key] += len(pack.seeds) * value
    return total


def read_packs(file: Path) -> list[Pack]:
    """A table's packs, one for every stream."""
    packs = expand(read_sweep(read_yaml(file), file.name))
    return [member for pack in packs for member in pack.members]


def plan(tables: Path = ROOT / "tables") -> dict[str, Any]:
    """Every file's minutes; what several files share is counted in each of them, and once in all."""
    found: dict[str, Any] = {}
    everything: dict[Path, dict[str, float]] = {}
    for file in sorted(tables.glob("*.yaml")):
        packs = {run_folder(Path(), pack.config, 0): pack for pack in read_packs(file)}
        known = [k for k, p in packs.items() if p.config.model in FAMILIES and p.config.method in TIMED]  # fmt: skip
        costs = {key: cost_of(packs[key]) for key in known}
        seeds = {key: len(pack.seeds) for key, pack in packs.items()}
        runs = {"runs": sum(seeds.values()), "timed_runs": sum(seeds[key] for key in known)}
        sums = {k: round(sum(c[k] for c in costs.values())) if costs else None for k in COSTS}
        found[file.name] = {"packs": len(packs), **runs, **sums}
        everything |= costs
    minutes = round(sum(cost["minutes"] for cost in everything.values()))
    return {"device": "NVIDIA H200", "tables": found, "minutes": minutes}


def to_markdown(found: Mapping[str, Any]) -> str:
    """The table of REPRODUCIBILITY.md."""
    keys = ("packs", "runs", "timed_runs", *COSTS)
    titles = ("configs", "runs", "of them timed", "steps", "rows scored", "minutes", "alone")
    lines = [f"| table | {' | '.join(titles)} |", f"|---|{'---|' * len(keys)}"]
    for name, entry in found["tables"].items():
        cells = ["" if entry[key] is None else f"{entry[key]:,}" for key in keys]
        lines.append(f"| [{name}](tables/{name}) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the plan, and its table into the document."""
    found = plan()
    (RESULTS / "plan.json").write_text(json.dumps(found, indent=1) + "\n")
    page = ROOT / "REPRODUCIBILITY.md"
    place = re.compile(r"(?<=<!-- plan -->\n).*(?=<!-- /plan -->)", re.S)
    page.write_text(place.sub(to_markdown(found), page.read_text(encoding="utf-8")))
    print(to_markdown(found))
    print(f"{found['minutes']:,} minutes in all, what is shared counted once")


if __name__ == "__main__":
    main()
