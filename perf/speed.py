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
from pathlib import Path

import torch
import transformers

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from peers import PADDED, TARGET_LENGTH, PeftLoop, ProgressiveLoop, trainer_step_seconds
from tests.conftest import WORDS, make_tokenizer

from qtuning import load_backbone, make_method, wrap_model
from qtuning.backbones.compiled import repeated_layers
from qtuning.config import make_settings
from qtuning.lanes import Fit
from qtuning.pack import Pack
from qtuning.tasks import Task

LABELS = ("world", "sport", "business", "science")
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


def make_task(words: int, validation: int) -> Task:
    """Texts of up to so many words: 20 per class to train, the rest to validate."""
    generator = torch.Generator().manual_seed(1)
    texts, labels, splits = [], [], []
    for i in range(len(LABELS) * (SHOTS + validation)):
        length = words - int(torch.randint(5, (1,), generator=generator))
        drawn = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        texts.append(" ".join(WORDS[k] for k in drawn))
        labels.append(LABELS[i % len(LABELS)])
        splits.append("train" if i < len(LABELS) * SHOTS else "validation")
    splits[-len(LABELS) :] = ["test"] * len(LABELS)
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

    def add(self, name: str, step: Callable[[], object], repeats: int, units: float = 1.0) -> None:
        """`units` of work (lanes, rows) are done by one call; the first call compiles and is not counted."""
        began = time.perf_counter()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(3 if self.device == "cuda" else 1):
            step()
        self.wait()
        if self.device == "cuda":
            self.memory[name] = torch.cuda.max_memory_allocated() / 2**30
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


def run(geometry: str, device: str, packs: list[int], rounds: int, dtype: str) -> dict:
    """All measurements of one geometry on one device."""
    on_card = device == "cuda"
    if not on_card:
        torch.set_num_threads(2)
    model, backbone = build(geometry, device, dtype)
    is_causal = backbone.family == "causal"
    task = make_task(89 if not is_causal else 87, VALIDATION if on_card else 12)
    one = Ours(backbone, task, 1)
    lane = one.fits[0].lane
    rows = len(lane.layout(lane.tensors))
    texts = [tokens.ids for tokens in lane.train]
    targets = [lane.answers.sequences[label] for label in lane.train_labels]
    record = {
        "geometry": geometry, "dtype": dtype, "prompt_rows": rows, "batch_size": BATCH,
        "mean_text_tokens": statistics.mean(map(len, texts)), "rounds": rounds,
        "train_rows": len(texts), "validation_rows": len(lane.validation),
    }  # fmt: skip
    bench = Bench(device)
    few = 1 if not on_card else 5
    if not is_causal:
        peer = ProgressiveLoop(model, rows, PROMPT)
        bench.add("reference step", lambda: peer.step(texts[:BATCH], targets[:BATCH]), few)
        bench.add("reference row", lambda: peer.validate(texts[:BATCH]), few, BATCH)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    tuned = {}
    for attention in ("eager", "sdpa"):
        source = model
        source.set_attn_implementation(attention)
        tuned[attention] = PeftLoop(source, rows, kind, is_causal)
        loop = tuned[attention]
        bench.add(
            f"peft step, {attention}",
            lambda loop=loop: loop.step(texts[:BATCH], targets[:BATCH]),
            few,
        )
    bench.add("ours alone, eager", one.step, few)
    for lanes in packs[:3]:
        bench.add(f"ours packed {lanes}, eager", Ours(backbone, task, lanes).step, 2, lanes)
    bench.add("ours row, eager", one.validate, 1, len(lane.validation))
    bench.measure(rounds)
    found = bench.results()
    with tempfile.TemporaryDirectory() as folder:
        steps = 20 if on_card else 3
        seconds = trainer_step_seconds(tuned["sdpa"], texts, targets, BATCH, steps, folder)
        found["peft step, Trainer"] = {"ms": 1000 * seconds}
    if on_card:
        record["matrix_tflops"] = matrix_rate(device)
        found |= compiled(backbone, task, packs, rounds, tuned["sdpa"], texts, targets)
        if geometry in GEOMETRY:
            backbone.max_length = 12_000  # T5 counts distances, not positions
            record["growth"] = growth(backbone, task, rounds)
            backbone.max_length = PADDED
    if geometry in GEOMETRY:
        tokens = BATCH * (rows + statistics.mean(map(len, texts)))
        record["ideal_step_tflop"] = step_flops(geometry, tokens, BATCH) / 1e12
    record["tokens_per_step"] = BATCH * (rows + statistics.mean(map(len, texts)))
    record["results"] = found
    return record


def compiled(backbone, task, packs, rounds, peft, texts, targets) -> dict[str, dict[str, float]]:
    """Captured as CUDA graphs, and compiled as well; PEFT with compiled layers beside it."""
    bench = Bench("cuda")
    with mode(backbone, "captured"):
        for lanes in (1, *packs[:2]):
            add_pack(bench, backbone, task, lanes, "captured")
    largest = 1
    with mode(backbone, "compiled"):
        for lanes in (1, *packs):
            largest = lanes if add_pack(bench, backbone, task, lanes, "compiled") else largest
        checked = Ours(backbone, task, min(4, largest))
        rows = checked.lanes * len(checked.fits[0].lane.validation)
        bench.add("ours row, compiled", in_mode(backbone, "compiled", checked.validate), 1, rows)
        kept = Ours(backbone, task, min(16, largest), retention=True)
        name = f"ours packed {kept.lanes} with retention, compiled"
        bench.add(name, in_mode(backbone, "compiled", kept.step), 3, kept.lanes)
    for layer in repeated_layers(peft.model):
        layer.compile()
    try:
        bench.add("peft step, compiled", lambda: peft.step(texts[:BATCH], targets[:BATCH]), 5)
    except Exception as error:
        print(f"  PEFT does not compile: {error!r}"[:300], flush=True)
    bench.measure(rounds)
    return bench.results()


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


def add_pack(bench: Bench, backbone, task: Task, lanes: int, way: str) -> bool:
    """A pack as a candidate; whether it fits the card."""
    name = "ours alone" if lanes == 1 else f"ours packed {lanes}"
    try:
        step = in_mode(backbone, way, Ours(backbone, task, lanes).step)
        bench.add(f"{name}, {way}", step, 10 if lanes == 1 else 3, lanes)
    except torch.OutOfMemoryError:
        print(f"  {lanes} lanes do not fit", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        return False
    return True


def growth(backbone, task: Task, rounds: int) -> list[dict[str, object]]:
    """One lane's step and memory at tasks 12, 70, 300 and 1,000: Q-tuning's, and ProgPrompt's until it no longer fits.

    Q-tuning evicts at all of them, so retention is on. Steps are captured; the queue's values are
    random, because a step's cost does not depend on them.
    """
    bench = Bench("cuda")
    found = []
    for number in (12, 70, 300, 1000):
        for method in ("q-tuning", "prog-prompt"):
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            entry: dict[str, object] = {"method": method, "task": number}
            try:
                lane = Ours(backbone, task, 1, retention=True, number=number, method=method)
                entry["prompt_rows"] = lane.pack.stacks[0].rows
                name = f"{method} at {number}"
                bench.add(name, in_mode(backbone, "captured", lane.step), 5)
                entry |= {"name": name, "peak_gib": bench.memory[name] - before / 2**30}
            except torch.OutOfMemoryError:
                entry["fits"] = False
            found.append(entry)
            del lane
    bench.measure(rounds)
    results = bench.results()
    for entry in found:
        if name := entry.pop("name", None):
            entry["step_ms"] = results[name]["ms"]
    return found


def epoch_ms(record: dict, step: str, row: str) -> float:
    """One epoch of one run: its training steps and all its validation rows."""
    results = record["results"]
    steps = -(-record["train_rows"] // record["batch_size"])
    rows = len(LABELS) * VALIDATION
    return steps * results[step]["ms"] + rows * results[row]["ms"]


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
    parser.add_argument("--packs", type=int, nargs="*", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    on_card = given.device == "cuda"
    packs = given.packs if given.packs is not None else ([8, 16, 48] if on_card else [])
    dtype = given.dtype or ("bf16" if on_card else "fp32")
    record = run(given.geometry, given.device, packs, given.rounds, dtype)
    results = record["results"]
    if "reference step" in results:
        ways = [
            name.removeprefix("ours ")
            for name in results
            if name.startswith("ours ") and "row" not in name
        ]
        row = "ours row, compiled" if on_card else "ours row, eager"
        record["epoch_ms"] = {"reference": epoch_ms(record, "reference step", "reference row")} | {
            way: epoch_ms(record, f"ours {way}", row) for way in ways
        }
    command = f"python perf/speed.py --geometry {given.geometry} --device {given.device}"
    record = {
        "command": f"{command} --packs {' '.join(map(str, packs))} --rounds {given.rounds}",
        "date": date.today().isoformat(),
        "versions": environment(given.device),
        "setting": {"reference padded to": PADDED, "reference generates": TARGET_LENGTH - 1},
        **record,
    }
    given.output.mkdir(parents=True, exist_ok=True)
    kind = "gpu" if on_card else "cpu"
    path = given.output / f"speed-{given.geometry}-{kind}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    for name, value in results.items():
        print(f"{name:45} {value['ms']:10.3f} ms   {value.get('peak_gib', 0):6.1f} GiB")


if __name__ == "__main__":
    main()
