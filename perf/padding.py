"""A step of many lanes with their rows padded in a few passes, and as one line in which every prompt stands once.

27 lanes: the tasks at one place of orders 11, 12 and 13, by three methods, three seeds each, with the preset `smollm2`;
fewer with fewer orders or seeds.
Both ways take turns in one process, on a card captured and compiled for all lengths; the first steps of both are
compared. Scoring every lane's rows to validate is timed as well.

Run: python perf/padding.py --data DIR                                        (a CUDA card)
     python perf/padding.py --data DIR --device cpu --orders 1 --seeds 1 --steps 2
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from datetime import date
from itertools import islice
from pathlib import Path

import torch
import transformers

from qtuning import load_backbone, make_method
from qtuning.config import make_settings
from qtuning.data import load_task
from qtuning.fit import Fit
from qtuning.pack import Pack
from qtuning.presets import get_preset
from qtuning.protocols import make_split
from qtuning.streams import get_stream

ORDERS = ("order-11", "order-12", "order-13")
METHODS = ("q-tuning", "per-task-prompt", "shared-prompt")
WAYS = ("padded", "line")


class Steps:
    """The lanes at one place of the streams, as a pack that reads in one of the two ways."""

    def __init__(self, backbone, place: int, data: str, orders: int, seeds: int, way: str):
        self.backbone, self.way = backbone, way
        self.use()
        self.fits = []
        for order in ORDERS[:orders]:
            task = load_task(get_stream(order).tasks[place], data)
            for method in METHODS:
                settings = make_settings(backbone.family, **get_preset("smollm2", method))
                learner = make_method(method, backbone, *settings)
                train = settings[1]
                for seed in range(seeds):
                    split = make_split(
                        "progprompt", task, train.shots, seed, train.validation_limit
                    )
                    state = learner.start(seed)
                    if (
                        method == "q-tuning"
                    ):  # a full queue; what stands in it does not change a step's cost
                        size = (50, backbone.embed_dim)
                        rows = 0.1 * torch.randn(
                            size, generator=torch.Generator().manual_seed(seed)
                        )
                        layout = torch.cat([state.shared_prefix, rows])
                        queue = replace(state.queue, rows=rows)
                        state = replace(state, queue=queue, learnt=place, last_layout=layout)
                    self.fits.append(Fit(learner.lane(state, task, split), train))
        settings = [fit.settings for fit in self.fits]
        self.pack = Pack(backbone, [fit.lane for fit in self.fits], settings)
        self.pack.expect([fit.batches_ahead() for fit in self.fits])

    def use(self) -> None:
        """Rows in this way from now on."""
        self.backbone.may_read_lines = self.way == "line"

    def step(self) -> None:
        """One step of every lane."""
        self.use()
        self.pack.step([fit.next_batch() for fit in self.fits], [fit.step for fit in self.fits])

    def positions(self) -> float:
        """What a step reads, the mean of the next ones."""
        ahead = zip(*(fit.batches_ahead() for fit in self.fits), strict=False)
        plans = [self.pack.plan(each, [1] * len(self.fits))[1] for each in islice(ahead, 20)]
        if self.backbone.reads_lines:
            return statistics.mean(positions for [(_, positions)] in plans)
        return statistics.mean(sum(rows * width for rows, width in passes) for passes in plans)


def measure(backbone, place: int, data: str, orders: int, seeds: int, rounds: int, repeats: int) -> dict:  # fmt: skip
    """Milliseconds a step, positions and first losses of both ways at one place."""
    ways = {way: Steps(backbone, place, data, orders, seeds, way) for way in WAYS}
    tasks = [get_stream(order).tasks[place] for order in ORDERS[:orders]]
    found = {"place": place + 1, "tasks": tasks}
    losses, times, scoring = {}, {way: [] for way in WAYS}, {way: [] for way in WAYS}
    for way, steps in ways.items():
        for _ in range(4):  # as it is, captured, and two replays
            steps.step()
        losses[way] = steps.pack.take_losses()
        steps.pack.validate(range(len(steps.fits)))  # put into tensors, and compiled
    for _ in range(rounds):
        for way, steps in ways.items():
            began = now(backbone)
            for _ in range(repeats):
                steps.step()
            times[way].append(1000 * (now(backbone) - began) / repeats)
            began = now(backbone)
            steps.pack.validate(range(len(steps.fits)))
            scoring[way].append(1000 * (now(backbone) - began))
    for way, steps in ways.items():
        steps.use()
        found[way] = {
            "ms": statistics.median(times[way]), "rounds_ms": times[way], "passes": max(1, len(steps.pack.passes)),
            "positions": steps.positions(), "first_losses": losses[way][0].tolist(),
            "scoring_ms": statistics.median(scoring[way]), "rounds_scoring_ms": scoring[way],
        }  # fmt: skip
    found["largest_difference_of_first_losses"] = float(
        abs(losses["padded"][0] - losses["line"][0]).max()
    )
    found["ratio"] = found["padded"]["ms"] / found["line"]["ms"]
    found["scoring_ratio"] = found["padded"]["scoring_ms"] / found["line"]["scoring_ms"]
    return found


def now(backbone) -> float:
    """Seconds, when all that was asked for is done."""
    if backbone.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def study(
    backbone, data: str, places: list[int], orders: int, seeds: int, rounds: int, repeats: int
) -> dict:
    """All places, with what they were measured on."""
    on_card = backbone.device.type == "cuda"
    backbone.is_captured = backbone.is_compiled = backbone.for_all_lengths = on_card
    results = []
    for place in places:
        results.append(measure(backbone, place - 1, data, orders, seeds, rounds, repeats))
        shown = {
            way: (round(results[-1][way]["ms"], 2), results[-1][way]["positions"]) for way in WAYS
        }
        ratios = [f"{results[-1][each]:.2f}" for each in ("ratio", "scoring_ratio")]
        print(place, shown, *ratios, flush=True)
    backbone.may_read_lines = True
    return {
        "command": f"python perf/padding.py --data DIR --device {backbone.device.type} --places "
        f"{' '.join(map(str, places))} --orders {orders} --seeds {seeds} --rounds {rounds} --steps {repeats}",
        "date": date.today().isoformat(),
        "versions": {
            "device": torch.cuda.get_device_name() if on_card else "cpu",
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": backbone.name,
        "lanes": orders * len(METHODS) * seeds,
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "steps_a_round": repeats,
        "results": results,
        "ratio": statistics.geometric_mean(each["ratio"] for each in results),
        "scoring_ratio": statistics.geometric_mean(each["scoring_ratio"] for each in results),
    }


def main() -> None:
    """Both ways at a few places, to perf/results/padding-gpu.json or padding-cpu.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--places", type=int, nargs="+", default=[8, 25, 42, 59])
    parser.add_argument("--orders", type=int, default=len(ORDERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    on_card = given.device == "cuda"
    backbone = load_backbone(
        given.model,
        device=given.device,
        dtype="bf16" if on_card else "fp32",
        max_length=256,
        compile="dynamic" if on_card else "off",
    )
    if not backbone.reads_lines:
        raise SystemExit("lines do not work here: there is nothing to compare")
    record = study(
        backbone, given.data, given.places, given.orders, given.seeds, given.rounds, given.steps
    )
    default = Path(__file__).parent / "results" / f"padding-{'gpu' if on_card else 'cpu'}.json"
    (given.output or default).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
