"""Which earlier prompt helps which task, before any training: every task's texts under every other task's prompt.

A prompt per task is learnt on the stream `tuning-long` (training rows alone), then every task's training examples are
read under all of them: the loss that `warm_start: loss` compares, and the share of held-out rows answered right.

Run: python perf/transfer.py DATA
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from qtuning.backbones import Backbone, load_backbone
from qtuning.config import make_settings
from qtuning.data import load_stream
from qtuning.evaluation import score_predictions
from qtuning.methods import make_method
from qtuning.presets import get_preset
from qtuning.snapshots import Snapshot, predict_log_probs
from qtuning.stream_loop import run_stream
from qtuning.streams import get_stream
from qtuning.tasks import Split, Task
from qtuning.warm_start import word_losses

RESULT = Path(__file__).parent / "results" / "transfer-smollm2.json"
METHOD, MODEL, SEED, LENGTH = "per-task-prompt", "smollm2-135m", 100, 96
FEWER = {"epochs": 8, "validate_every": 4, "validation_limit": 8}
"""Less than the preset, so that it takes half an hour on two cores."""
TEST_ROWS = 10
"""Held-out rows per class."""


def main(data: str) -> None:
    """Learn the prompts, measure all pairs, write the file."""
    tasks = load_stream(get_stream("tuning-long"), data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backbone = load_backbone(MODEL, dtype="bf16", max_length=LENGTH, device=device)
    given = {**get_preset("smollm2", METHOD), **FEWER}
    settings = make_settings(backbone.family, **given)
    run = run_stream(
        make_method(METHOD, backbone, *settings),
        backbone,
        tasks,
        settings[1],
        seed=SEED,
        protocol="tuning",
        test_limit=TEST_ROWS,
        inner_rows=1,
        after_task=lambda task, _: print(f"learnt {task.name}", flush=True),
    )
    names = [task.name for task in tasks]
    untaught = make_method(METHOD, backbone, *settings)
    loss, score = {}, {}
    for task in tasks:
        split = run.splits[task.name]
        fresh = untaught.lane(untaught.start(SEED), task, split).trained["prompt"]
        first = Snapshot(run.state.snapshots[task.name].card, fresh.cpu())
        prompts = {**{n: run.state.snapshots[n] for n in names}, "vocabulary": first}
        found = {n: measure(backbone, own, task, split) for n, own in prompts.items()}
        loss[task.name] = {n: round(pair[0], 4) for n, pair in found.items()}
        score[task.name] = {n: round(pair[1], 4) for n, pair in found.items()}
        print(task.name, loss[task.name], flush=True)
    record = {
        "what": "task -> prompt of: mean loss of the task's training examples, score on held-out rows",
        "model": MODEL,
        "stream": "tuning-long",
        "protocol": "tuning",
        "method": METHOD,
        "seed": SEED,
        "settings": given,
        "max_length": LENGTH,
        "test_rows_per_class": TEST_ROWS,
        "loss": loss,
        "score": score,
        "versions": {"torch": torch.__version__, "transformers": version("transformers"), "device": device},
        "command": "python perf/transfer.py DATA",
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measure(backbone: Backbone, prompt: Snapshot, task: Task, split: Split) -> tuple[float, float]:
    """Loss of the training examples and score of the held-out rows of a task under some prompt."""
    card = type(prompt.card).of(task)
    asked = Snapshot(card, prompt.rows)
    words = [card.label_words[name] for name in card.label_names]
    (loss,) = word_losses(backbone, [asked], split.train, backbone.answers(words))
    guess = predict_log_probs(backbone, asked, split.test.texts).argmax(dim=-1).tolist()
    return loss, score_predictions(task.metric, split.test.labels, guess, split.test.groups)


if __name__ == "__main__":
    main(sys.argv[1])
