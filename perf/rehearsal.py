"""A training step of LFPT5 on a CPU: every text read once for its task, and every text read again at each step.

Starter texts repeated to so many words, 8 a step and 60 prompt vectors, without pseudo-samples of an
earlier task and with some. The two ways take turns in one process, from the same prompt; their losses are compared.

Run: python perf/rehearsal.py            (SmolLM2-135M in bfloat16; about three minutes)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path

from half import conditions

from qtuning import Task, load_backbone
from qtuning.config import make_settings
from qtuning.data import load_task
from qtuning.methods import rehearsing
from qtuning.methods.lfpt5 import LFPT5
from qtuning.methods.rehearsing import LFPT5Loss
from qtuning.snapshots import TaskCard
from qtuning.tasks import Rows
from qtuning.weights import make_examples

TEXTS, WARM = 8, 1
WAYS = {"read once": rehearsing._reads_texts_once, "read at each step": lambda *_: False}


def losses_of(method: LFPT5, words: int, pseudo: int) -> dict[str, LFPT5Loss]:
    """What a step learns, in both ways."""
    short = load_task("spam", None)
    longer = [" ".join((text.split() * words)[:words]) for text in short.texts]
    task = Task("spam", longer, short.labels)
    rows = task.split(TEXTS // 2).train
    old = method._first_prompt(0, TaskCard.of(task))
    prompt = old.clone().requires_grad_()
    train = make_examples(method.view, task, rows, None, prompt)
    writing = method._writing(TaskCard.of(task), rows, prompt)
    again = Rows(tuple(longer[:pseudo]), (0,) * pseudo)
    earlier = [make_examples(method.view, task, again, None, prompt)] if pseudo else []
    made = {}
    for name, rule in WAYS.items():
        rehearsing._reads_texts_once = rule
        made[name] = LFPT5Loss(train, writing, earlier, old, method.settings, method.backbone)
    return made


def step_ms(learnt: LFPT5Loss, steps: int) -> tuple[float, float]:
    """Milliseconds of a step, over so many, and its loss."""
    began = time.perf_counter()
    for _ in range(steps):
        loss = learnt.loss(range(TEXTS))
        loss.backward()
    return 1000 * (time.perf_counter() - began) / steps, float(loss.detach())


def measure(method: LFPT5, words: int, pseudo: int, rounds: int, steps: int) -> dict:
    """Both ways, in turns."""
    ways = losses_of(method, words, pseudo)
    losses = {name: step_ms(way, WARM)[1] for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(step_ms(way, steps)[0])
    once, again = (statistics.median(times[name]) for name in WAYS)
    return {
        "words": words,
        "pseudo_samples": pseudo,
        "median_ms": {"read once": once, "read at each step": again},
        "rounds_ms": times,
        "losses": losses,
        "times_as_fast": again / once,
    }


def main() -> None:
    """All lengths, to perf/results/rehearsal-cpu.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--words", type=int, nargs="+", default=[20, 120])
    parser.add_argument("--pseudo", type=int, nargs="+", default=[0, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    backbone = load_backbone("smollm2-135m", dtype="bf16", device="cpu", max_length=256)
    method = LFPT5(backbone, *make_settings(backbone.family, queue_size=5))
    found = []
    for words in given.words:
        for pseudo in given.pseudo:
            found.append(measure(method, words, pseudo, given.rounds, given.steps))
            rounded = {name: round(ms) for name, ms in found[-1]["median_ms"].items()}
            print(words, pseudo, rounded, found[-1]["times_as_fast"], flush=True)
    record = {
        "command": f"python perf/rehearsal.py --words {' '.join(map(str, given.words))} "
        f"--pseudo {' '.join(map(str, given.pseudo))} --rounds {given.rounds} --steps {given.steps}",
        "date": date.today().isoformat(),
        "model": "smollm2-135m, bf16",
        "versions": conditions(),
        "results": found,
    }
    path = Path(__file__).parent / "results" / "rehearsal-cpu.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
