"""A training step on a CPU in float32, in bfloat16, and in bfloat16 with the gradient of attention made of products.

One lane of prompt tuning, 8 texts a step with 30 prompt vectors: starter texts repeated to so many words. The ways take
turns in one process; their first losses are compared.

Run: python perf/half.py                 (two models, short texts and long ones; about three minutes)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import torch
import transformers

from qtuning import Task, load_backbone, make_method
from qtuning.backbones import beside, products
from qtuning.config import make_settings
from qtuning.data import load_task
from qtuning.fit import Fit
from qtuning.pack import Pack
from qtuning.protocols import make_split

WAYS = {"float32": ("fp32", True), "bf16, torch's": ("bf16", False), "bf16, products": ("bf16", True)}  # fmt: skip
"""Number type, and whether a slow gradient of attention may be avoided."""
TEXTS, ROWS, WARM = 8, 30, 2


class Way:
    """A lane that is trained in one of the ways."""

    def __init__(self, model: str, name: str, words: int):
        self.dtype, self.may_avoid = WAYS[name]
        backbone = load_backbone(model, dtype=self.dtype, device="cpu", max_length=256)
        short = load_task("spam", None)
        longer = [" ".join((text.split() * words)[:words]) for text in short.texts]
        task = Task("spam", longer, short.labels)
        chosen = {"batch_size": TEXTS, "prompt_length": ROWS, "epochs": 9999, "most_steps": 0}
        settings = make_settings(backbone.family, **chosen)
        method = make_method("per-task-prompt", backbone, *settings)
        split = make_split("given", task, 32, 0, 1)
        self.fit = Fit(method.lane(method.start(0), task, split), settings[1])
        self.pack = Pack(backbone, [self.fit.lane], [settings[1]])
        self.pack.expect([self.fit.batches_ahead()])

    def step_ms(self, steps: int) -> float:
        """Milliseconds of a step, over so many."""
        kept = products.has_slow_gradient
        if not self.may_avoid:
            products.has_slow_gradient = beside.has_slow_gradient = lambda query: False
        began = time.perf_counter()
        for _ in range(steps):
            self.pack.step([self.fit.next_batch()], [self.fit.step])
        passed = time.perf_counter() - began
        products.has_slow_gradient = beside.has_slow_gradient = kept
        return 1000 * passed / steps


def measure(model: str, words: int, rounds: int, steps: int) -> dict:
    """Every way, in turns."""
    ways = {name: Way(model, name, words) for name in WAYS}
    for way in ways.values():
        way.step_ms(WARM)
    losses = {name: way.pack.take_losses().flatten().tolist() for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(way.step_ms(steps))
    medians = {name: statistics.median(each) for name, each in times.items()}
    ours = medians["bf16, products"]
    return {
        "model": model,
        "words": words,
        "median_ms": medians,
        "rounds_ms": times,
        "first_losses": losses,
        "times_as_fast_as": {name: medians[name] / ours for name in list(WAYS)[:2]},
    }


def main() -> None:
    """Both models and lengths, to perf/results/half-cpu.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["minilm", "smollm2-135m"])
    parser.add_argument("--words", type=int, nargs="+", default=[20, 120])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    found = []
    for model in given.models:
        for words in given.words:
            found.append(measure(model, words, given.rounds, given.steps))
            rounded = {name: round(ms, 1) for name, ms in found[-1]["median_ms"].items()}
            print(model, words, rounded, found[-1]["times_as_fast_as"], flush=True)
    record = {
        "command": f"python perf/half.py --models {' '.join(given.models)} --words {' '.join(map(str, given.words))} "
        f"--rounds {given.rounds} --steps {given.steps}",
        "date": date.today().isoformat(),
        "versions": conditions(),
        "results": found,
    }
    path = Path(__file__).parent / "results" / "half-cpu.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


def conditions() -> dict:
    """What times on a CPU depend on."""
    return {
        "device": _processor(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "multiplies_bf16": torch.cpu._is_avx512_bf16_supported(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    names = facts.read_text().splitlines() if facts.exists() else []
    name = next((line.split(": ", 1)[1] for line in names if line.startswith("model name")), "CPU")
    return f"{name}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
