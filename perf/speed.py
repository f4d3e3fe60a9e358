"""Speed of one training step, one validated row and one whole epoch: ours against the peers, in one process.

All candidates read the same texts with the same weights, and take turns: every round measures each of
them once, so that a card that slows down slows all of them. See docs/performance.md.

Run: python perf/speed.py --geometry t5-large --device cuda    (make speed-gpu)
     python perf/speed.py --geometry t5-small --device cpu     (make speed-cpu)
     python perf/speed.py --geometry smollm2-135m --device cuda
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
import transformers

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from peers import (
    LONG_TARGET_LENGTH,
    PADDED,
    TARGET_LENGTH,
    PeftLoop,
    ProgressiveLoop,
    trainer_step_seconds,
)
from tests.conftest import WORDS, make_tokenizer

from qtuning import load_backbone, make_method, wrap_model
from qtuning.backbones.compiled import repeated_layers
from qtuning.config import make_settings
from qtuning.fit import Fit
from qtuning.pack import Pack
from qtuning.tasks import Task

LABELS = ("world", "sport", "business", "science")
LONG_LABELS = tuple(f"{label} status report" for label in LABELS)
"""Four tokens with the end token."""
BATCH, PROMPT, SHARED, QUEUE = 8, 10, 10, 10
"""110 prompt rows: a shared prefix of 10, and a full queue of 100 with the new prompt in it."""
SHOTS, VALIDATION = 20, 250
"""Per class: the paper's few-shot setting, and ProgressivePrompts' validation rows."""
GEOMETRY = {
    "t5-large": {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
}


def build(geometry: str, device: str, dtype: str):
    """The model, ours around it, and whether it is causal."""
    if geometry not in GEOMETRY:
        backbone = load_backbone(geometry, dtype=dtype, device=device)
        return backbone.model, backbone
    config = transformers.T5Config(
        vocab_size=32128, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2, **GEOMETRY[geometry]
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.T5ForConditionalGeneration(config)
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    model = model.to(kinds[dtype]).eval()
    return model, wrap_model(model, make_tokenizer("t5"), name=geometry, max_length=PADDED)


def make_task(words: int, validation: int, names: tuple[str, ...] = LABELS) -> Task:
    """Texts of up to so many words: 20 per class to train, the rest to validate."""
    generator = torch.Generator().manual_seed(1)
    texts, labels, splits = [], [], []
    for i in range(len(names) * (SHOTS + validation)):
        length = words - int(torch.randint(5, (1,), generator=generator))
        drawn = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        texts.append(" ".join(WORDS[k] for k in drawn))
        labels.append(names[i % len(names)])
        splits.append("train" if i < len(names) * SHOTS else "validation")
    splits[-len(names) :] = ["test"] * len(names)
    return Task("speed", texts, labels, splits=splits)


class Ours:
    """Lanes of Q-tuning at a full queue, as a pack."""

    def __init__(
        self,
        backbone,
        task: Task,
        lanes: int,
        retention: bool = False,
        number: int = 12,
        method: str = "q-tuning",
    ):
        flat = {
            "prompt_length": PROMPT, "shared_length": SHARED, "queue_size": QUEUE, "batch_size": BATCH,
            "shots": SHOTS, "memory_factor": 0.01 if retention else 0.0, "validation_limit": VALIDATION,
        }  # fmt: skip
        learner = make_method(method, backbone, *make_settings(backbone.family, **flat))
        self.fits = []
        for seed in range(lanes):
            state = learner.start(seed)
            generator = torch.Generator().manual_seed(seed)
            prompts = QUEUE if learner.settings.eviction != "none" else number - 1
            size = (PROMPT * prompts, backbone.embed_dim)
            rows = 0.5 * torch.randn(size, generator=generator, dtype=backbone.lane_dtype)
            queue = replace(state.queue, rows=rows)
            layout = torch.cat([state.shared_prefix, rows])
            state = replace(state, queue=queue, learnt=number - 1, last_layout=layout)
            lane = learner.lane(state, task, task.split(SHOTS, seed, VALIDATION))
            self.fits.append(Fit(lane, learner.train))
        self.backbone, self.lanes = backbone, lanes
        self.pack = Pack(backbone, [fit.lane for fit in self.fits], learner.train)

    def step(self) -> None:
        """One step of every lane."""
        self.pack.step([fit.next_batch() for fit in self.fits], [fit.step for fit in self.fits])
        self.pack.losses.clear()

    def validate(self) -> None:
        """All lanes' validation rows."""
        self.pack.validate(range(self.lanes))


class Bench:
    """Candidates by name, measured in turns."""

    def __init__(self, device: str):
        self.device = device
        self.steps: dict[str, tuple[Callable[[], object], int, float]] = {}
        self.times: dict[str, list[float]] = {}
        self.memory: dict[str, float] = {}

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def add(
        self,
        name: str,
        step: Callable[[], object],
        repeats: int,
        units: float = 1.0,
        warm_up: int = 3,
    ) -> None:
        """`units` of work (lanes, rows) are done by one call; calls that warm up are not counted."""
        began, before = time.perf_counter(), 0
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for _ in range(warm_up if self.device == "cuda" else 1):
            step()
        self.wait()
        if self.device == "cuda":
            self.memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
        print(f"  ready: {name}, {time.perf_counter() - began:.1f} s", flush=True)
        self.steps[name], self.times[name] = (step, repeats, units), []

    def measure(self, rounds: int) -> None:
        """Every candidate once in every round."""
        for _ in range(rounds):
            for name, (step, repeats, units) in self.steps.items():
                self.wait()
                began = time.perf_counter()
                for _ in range(repeats):
                    step()
                self.wait()
                self.times[name].append((time.perf_counter() - began) / repeats / units)

    def results(self) -> dict[str, dict[str, float]]:
        """Milliseconds of one unit: median and spread over the rounds."""
        return {
            name: {
                "ms": 1000 * statistics.median(times),
                "fastest_ms": 1000 * min(times),
                "slowest_ms": 1000 * max(times),
                **({"peak_gib": self.memory[name]} if name in self.memory else {}),
            }
            for name, times in self.times.items()
        }


def matrix_rate(device: str) -> float:
    """TFLOP/s of a large bf16 matrix product on this device."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(30):
        a @ b
    torch.cuda.synchronize()
    return 30 * 2 * 8192**3 / (time.perf_counter() - began) / 1e12


def step_flops(geometry: str, tokens: int, rows: int) -> float:
    """Multiplications and additions that one step cannot do without.

    Frozen encoder layers forward, and backward to their inputs; the decoder is left out.
    """
    g = GEOMETRY[geometry]
    d, inner, layers = g["d_model"], g["num_heads"] * g["d_kv"], g["num_layers"]
    per_token = 2 * layers * (4 * d * inner + 2 * d * g["d_ff"])
    length = tokens / rows
    attention = layers * 4 * length * inner  # per token
    return tokens * (2 * per_token + 3 * attention)


class Study:
    """All measurements of one geometry on one device, written to disk as they are made."""

    def __init__(self, geometry: str, device: str, dtype: str, path: Path, head: dict):
        self.geometry, self.device, self.path = geometry, device, path
        self.on_card = device == "cuda"
        self.model, self.backbone = build(geometry, device, dtype)
        self.is_causal = self.backbone.family == "causal"
        words = 87 if self.is_causal else 89
        self.tasks = [
            make_task(words, VALIDATION if self.on_card else 12, names)
            for names in (LABELS, LONG_LABELS)
        ]
        self.task = self.tasks[0]
        lane = Ours(self.backbone, self.task, 1).fits[0].lane
        self.rows = len(lane.layout(lane.tensors))
        self.texts = [tokens.ids for tokens in lane.train]
        self.targets = [lane.answers.sequences[label] for label in lane.train_labels]
        self.dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        self.bench = Bench(device)
        mean = statistics.mean(map(len, self.texts))
        self.record = {
            **head, "geometry": geometry, "dtype": dtype, "prompt_rows": self.rows,
            "batch_size": BATCH, "mean_text_tokens": mean, "train_rows": len(self.texts),
            "tokens_per_step": BATCH * (self.rows + mean),
        }  # fmt: skip
        if geometry in GEOMETRY:
            flops = step_flops(geometry, BATCH * (self.rows + mean), BATCH)
            self.record["ideal_step_tflop"] = flops / 1e12

    def batch(self) -> tuple[list, list]:
        """The peers' batch."""
        return self.texts[:BATCH], self.targets[:BATCH]

    def save(self) -> None:
        """What is known so far."""
        self.path.write_text(json.dumps(self.record, indent=1) + "\n")

    def add_peers(self) -> None:
        """The reference loop, and PEFT with both of its attentions."""
        few = 5 if self.on_card else 1
        if not self.is_causal:
            peer = ProgressiveLoop(self.model, self.rows, PROMPT)
            self.bench.add("reference step", lambda: peer.step(*self.batch()), few)
            for name, length in ("row", TARGET_LENGTH), ("row, long answer", LONG_TARGET_LENGTH):
                validate = partial(peer.validate, self.batch()[0], length)
                self.bench.add(f"reference {name}", validate, few, BATCH)
        self.peft = {}
        for attention in ("eager", "sdpa"):
            self.model.set_attn_implementation(attention)
            loop = PeftLoop(self.model, self.rows, self.dtype, self.is_causal)
            self.peft[attention] = loop
            self.bench.add(
                f"peft step, {attention}", lambda loop=loop: loop.step(*self.batch()), few
            )

    def add_ours(self, lanes: int, way: str, retention: bool = False) -> None:
        """A pack of so many lanes, launched in that way."""
        name = "ours alone" if lanes == 1 else f"ours packed {lanes}"
        name += " with retention" if retention else ""
        try:
            ours = Ours(self.backbone, self.task, lanes, retention)
            repeats = (10 if lanes == 1 else 3) if self.on_card else 1
            self.bench.add(f"{name}, {way}", in_mode(self.backbone, way, ours.step), repeats, lanes)
        except torch.OutOfMemoryError:
            print(f"  {name}, {way}: does not fit", flush=True)

    def add_rows(self, lanes: int) -> None:
        """Validation of so many lanes together."""
        for name, task in zip(("row", "row, long answer"), self.tasks, strict=True):
            ours = Ours(self.backbone, task, lanes)
            count = lanes * len(ours.fits[0].lane.validation)
            self.bench.add(f"ours {name}", ours.validate, 1, count, warm_up=1)

    def measure(self, rounds: int) -> None:
        """Everything that was added, in turns."""
        self.bench.measure(rounds)
        self.record |= {"rounds": rounds, "results": self.bench.results()}
        if self.on_card:
            self.record["matrix_tflops"] = matrix_rate(self.device)
        if "reference step" in self.record["results"]:
            self.record["epoch_ms"] = epochs(self.record)
        self.save()

    def measure_trainer(self) -> None:
        """PEFT under the Trainer of transformers."""
        steps = 8 if self.on_card else 3
        with tempfile.TemporaryDirectory() as folder:
            loop = self.peft["sdpa"]
            seconds = trainer_step_seconds(loop, self.texts, self.targets, BATCH, steps, folder)
        self.record["results"]["peft step, Trainer"] = {"ms": 1000 * seconds}
        self.save()

    def measure_peft_compiled(self, rounds: int) -> None:
        """PEFT with compiled layers."""
        bench = Bench(self.device)
        loop = self.peft["sdpa"]
        for layer in repeated_layers(loop.model):
            layer.compile()
        bench.add("peft step, compiled", lambda: loop.step(*self.batch()), 5)
        bench.measure(rounds)
        self.record["results"] |= bench.results()
        self.save()

    def measure_growth(self, rounds: int, numbers: tuple[int, ...] = (12, 70, 300, 1000)) -> None:
        """One lane at later and later tasks: Q-tuning's step, and ProgPrompt's until it no longer fits.

        Q-tuning evicts at all of them, so retention is on. The queue's values are random, because
        a step's cost does not depend on them.
        """
        self.bench = Bench(self.device)  # gives back the memory of what was measured before
        bench, found = self.bench, []
        self.backbone.max_length = 12_000  # T5 counts distances, not positions
        for number in numbers:
            for method in ("q-tuning", "prog-prompt"):
                entry: dict[str, object] = {"method": method, "task": number}
                found.append(entry)
                name = f"{method} at {number}"
                try:
                    tidy(self.device)
                    lane = Ours(self.backbone, self.task, 1, True, number, method)
                    entry["prompt_rows"] = lane.pack.stacks[0].rows
                    step = in_mode(self.backbone, "captured", lane.step)
                    bench.add(name, step, 5 if self.on_card else 1)
                    entry |= {"name": name, "peak_gib": bench.memory.get(name, 0)}
                except torch.OutOfMemoryError:
                    entry["fits"] = False
        bench.measure(rounds)
        results = bench.results()
        for entry in found:
            if name := entry.pop("name", None):
                entry["step_ms"] = results[name]["ms"]
        self.backbone.max_length = PADDED
        self.record["growth"] = found
        self.save()


def tidy(device: str) -> None:
    """Give back what is not used."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def mode(backbone, name: str):
    """How our steps are launched inside: eager, captured or compiled."""
    before = backbone.is_captured, backbone.is_compiled
    backbone.is_captured, backbone.is_compiled = name != "eager", name == "compiled"
    try:
        yield
    finally:
        backbone.is_captured, backbone.is_compiled = before


def in_mode(backbone, name: str, step: Callable[[], object]) -> Callable[[], None]:
    """The step, always launched in that way."""

    def run() -> None:
        with mode(backbone, name):
            step()

    return run


def epochs(record: dict) -> dict[str, float]:
    """Milliseconds of one epoch of one run: its training steps and the protocol's validation rows."""
    results = record["results"]
    steps = -(-record["train_rows"] // record["batch_size"])
    rows = len(LABELS) * VALIDATION
    found = {"reference": ("reference step", "reference row")}
    found |= {n: (n, "ours row") for n in results if n.startswith("ours ") and "ours row" not in n}
    return {
        name: steps * results[step]["ms"] + rows * results[row]["ms"]
        for name, (step, row) in found.items()
    }


def environment(device: str) -> dict[str, str]:
    """Card and versions."""
    import peft

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }  # fmt: skip


def main() -> None:
    """Measure one geometry and write its JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--geometry", default="t5-large")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None)
    parser.add_argument(
        "--captured", type=int, nargs="*", default=None, help="packs of so many lanes"
    )
    parser.add_argument("--compiled", type=int, nargs="*", default=None, help="the same, compiled")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    on_card = given.device == "cuda"
    if not on_card:
        torch.set_num_threads(2)
    captured = given.captured if given.captured is not None else ([1, 8, 16, 48] if on_card else [])
    compiled = given.compiled if given.compiled is not None else ([1, 16, 48] if on_card else [])
    head = {
        "command": " ".join(["python", "perf/speed.py", *sys.argv[1:]]).replace(str(given.output), "perf/results"),
        "date": date.today().isoformat(),
        "versions": environment(given.device),
        "setting": {
            "reference padded to": PADDED,
            "reference generates": TARGET_LENGTH - 1,
            "long answers": LONG_TARGET_LENGTH - 1,
        },
    }  # fmt: skip
    given.output.mkdir(parents=True, exist_ok=True)
    dtype = given.dtype or ("bf16" if on_card else "fp32")
    kind = "gpu" if on_card else "cpu" if dtype == "fp32" else f"cpu-{dtype}"
    path = given.output / f"speed-{given.geometry}-{kind}.json"
    study = Study(given.geometry, given.device, dtype, path, head)
    study.add_peers()
    study.add_ours(1, "eager")
    for lanes in captured:
        study.add_ours(lanes, "captured")
    for lanes in compiled:
        study.add_ours(lanes, "compiled")
    if on_card:
        study.add_ours(16, "compiled" if compiled else "captured", retention=True)
    study.add_rows(4 if on_card else 1)
    study.measure(given.rounds)
    for name, value in study.record["results"].items():
        print(f"{name:45} {value['ms']:10.3f} ms   {value.get('peak_gib', 0):6.1f} GiB", flush=True)
    if on_card and given.geometry in GEOMETRY:
        study.measure_growth(given.rounds)
        print(study.record["growth"], flush=True)
    study.measure_trainer()
    if compiled:
        study.measure_peft_compiled(given.rounds)


if __name__ == "__main__":
    main()
