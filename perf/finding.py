"""How often the task of a text is found by its key, and how often a text of no taught task is called unknown.

Keys need no prompt, so nothing is trained: only the frozen model reads. First all tasks of a stream are taught; then
every second one, and the rows of the others should be unknown.

Run: python perf/finding.py --stream order-09 --data DIR
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import date
from pathlib import Path
from statistics import mean

import torch
import transformers

from qtuning import load_backbone
from qtuning.data import load_stream
from qtuning.keys import Finder, learn_key, read_features
from qtuning.protocols import make_split
from qtuning.snapshots import TaskKey
from qtuning.streams import get_stream

SHOTS, VALIDATION = 20, 20


def shares(keys: dict[str, TaskKey], tests: dict[str, torch.Tensor]) -> dict[str, float]:
    """Means over tasks; what is not taught should be unknown."""
    finder = Finder(keys)
    found, accepted, refused = [], [], []
    for name, features in tests.items():
        answers = finder.find(features)
        if name in keys:
            found.append(mean(each.task == name for each in answers))
            accepted.append(mean(each.task == name and each.is_known for each in answers))
        else:
            refused.append(mean(not each.is_known for each in answers))
    whole = {"taught": len(keys), "task_found": mean(found), "found_and_known": mean(accepted)}
    return whole | ({"called_unknown": mean(refused)} if refused else {})


def main() -> None:
    """Measure one stream and write its JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stream", default="order-09")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--data", default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test-limit", type=int, default=20, help="rows per class")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    backbone = load_backbone(given.model)
    keys, tests = {}, {}
    for task in load_stream(get_stream(given.stream), given.data):
        split = make_split("progprompt", task, SHOTS, given.seed, VALIDATION, given.test_limit)
        keys[task.name] = learn_key(backbone, split)
        tests[task.name] = read_features(backbone, split.test.texts)
        print(f"{task.name}: {split.sizes}", flush=True)
    half = {name: key for i, (name, key) in enumerate(keys.items()) if i % 2 == 0}
    record = {
        "what": "finding the task of a text by its key; means over tasks",
        "command": f"python perf/finding.py --stream {given.stream} --model {given.model} --data DIR",
        "date": date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "backbone": backbone.name,
        "shots": SHOTS,
        "seed": given.seed,
        "test_rows": {name: len(features) for name, features in tests.items()},
        "all_taught": shares(keys, tests),
        "every_second_taught": shares(half, tests),
    }
    path = given.output / f"finding-{given.stream}-{given.model}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print({k: record[k] for k in ("all_taught", "every_second_taught")})


if __name__ == "__main__":
    main()
