"""A step that trains all weights of a model: in float32, with products in bf16, recorded, and compiled as well.

The ways take turns in one process: 8 texts a step, each a starter text repeated to so many words. In bf16 the layers
see rounded weights, so a small learning rate shows in the losses some steps later.

Run: python perf/weights.py                                    (a CUDA card)
     python perf/weights.py --model minilm --device cpu --steps 4 --words 40
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
import transformers

import qtuning
from qtuning.backbones import load_backbone
from qtuning.config import make_settings
from qtuning.data import load_task
from qtuning.tasks import Rows
from qtuning.weights import Hooks, fit_weights, make_examples, make_head, trainable_copy

WAYS = {
    "float32": ("fp32", "off"),
    "bf16": ("bf16", "off"),
    "recorded": ("bf16", "auto"),
    "compiled": ("bf16", "dynamic"),
}
"""Number type of the products, and how far it is sped up: recorded as CUDA graphs on a card, and compiled."""
BATCH, ROUNDS = 8, 3


class Training:
    """A copy of the model that is trained in one of the ways."""

    def __init__(self, model: str, device: str, way: str, words: int):
        dtype, compile = WAYS[way]
        self.worker = trainable_copy(
            load_backbone(model, dtype=dtype, device=device, compile=compile)
        )
        task = load_task("intent-bank", None)
        longer = [" ".join((text.split() * words)[:words]) for text in task.texts[: 4 * BATCH]]
        labels = [task.label_names.index(label) for label in task.labels[: 4 * BATCH]]
        # of several lengths, as real ones are
        texts = tuple(text[: len(text) * (8 - i % 4) // 8] for i, text in enumerate(longer))
        head = make_head(self.worker, len(task.label_names), torch.Generator().manual_seed(0))
        self.train = make_examples(self.worker, task, Rows(texts, labels), head)
        self.nothing = make_examples(self.worker, task, Rows((), ()), head)
        self.tokens = statistics.mean(self.train.lengths)
        self.losses: list[float] = []

    def run(self, steps: int) -> float:
        """Seconds of a step, over so many."""
        epochs = max(1, steps // 4)  # of four steps
        settings = replace(make_settings(batch_size=BATCH)[1], epochs=epochs, most_steps=0)
        heads = [self.train.head.weight, self.train.head.bias] if self.train.head else []
        groups = [([*self.worker.model.parameters(), *heads], 1e-5)]
        order = torch.Generator().manual_seed(0)
        began = self._now()
        fit_weights(
            self.train, self.nothing, "accuracy", settings, order, Hooks(), groups,
            lambda seen: self.losses.append(seen.loss),
        )  # fmt: skip
        return (self._now() - began) / (epochs * 4)

    def _now(self) -> float:
        if self.worker.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    """Measure, print, and write perf/results/weights-MODEL-DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--words", type=int, default=160)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    is_card = given.device.startswith("cuda")
    ways = {
        way: Training(given.model, given.device, way, given.words)
        for way in WAYS
        if is_card or way != "recorded"  # which is bf16 as it is without a card
    }
    for training in ways.values():
        training.run(16)  # compiles, records, and takes memory
    assert ways["compiled"].worker.is_compiled, "nothing to time: the layers cannot be compiled"
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, training in ways.items():
            found[way].append(training.run(given.steps))
    medians = {way: 1000 * statistics.median(times) for way, times in found.items()}
    record = {
        "command": f"python perf/weights.py --model {given.model} --device {given.device} "
        f"--steps {given.steps} --words {given.words}",
        "date": date.today().isoformat(),
        "versions": {
            "qtuning": qtuning.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name() if is_card else "CPU",
            "threads": torch.get_num_threads(),
        },
        "texts": {"batch": BATCH, "mean positions": ways["float32"].tokens},
        "step_ms": {way: [1000 * each for each in times] for way, times in found.items()},
        "median_ms": medians,
        "times_float32": {way: medians["float32"] / own for way, own in medians.items()},
        "first_losses": {way: training.losses[:2] for way, training in ways.items()},
    }  # fmt: skip
    name = f"weights-{Path(given.model).name}-{'gpu' if is_card else 'cpu'}.json"
    (given.output / name).write_text(json.dumps(record, indent=1) + "\n")
    shown = ("texts", "median_ms", "times_float32", "first_losses")
    print(json.dumps({key: record[key] for key in shown}, indent=1))


if __name__ == "__main__":
    main()
