"""Cost per task as a stream grows: Q-tuning's stays flat, ProgPrompt's grows until it no longer fits.

Measures one training step at tasks 5, 20 and 60 of a stream, on a tiny BERT with random weights:
median step time, peak memory of the tensors a step allocates, and prompt rows. Both methods are
measured in the same process, alternately, on the same texts.

Run: make growth        (or: python perf/growth.py --output perf/results)
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import weakref
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from qtuning import make_method, wrap_model
from qtuning.config import make_settings
from qtuning.fit import Fit
from qtuning.pack import Pack
from qtuning.tasks import Task

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.conftest import WORDS, make_tokenizer

TASKS = (5, 20, 60)
QUEUE_SIZE, PROMPT_LENGTH, BATCH, REPEATS = 4, 10, 8, 15


class PeakBytes(TorchDispatchMode):
    """Most bytes alive at once among the tensors made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)

        def gone() -> None:
            self.live -= self._seen.pop(key, 0)

        weakref.finalize(storage, gone)


def build_backbone():
    """A BERT of four layers with room for 60 prompts and the text."""
    tokenizer = make_tokenizer("bert")
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config)
    return wrap_model(model, tokenizer, name="tiny-bert-4x128", max_length=1024)


def build_task() -> Task:
    """Sixteen texts of thirty words."""
    texts = [" ".join(WORDS[(i + 7 * k) % 40] for k in range(30)) for i in range(16)]
    return Task(
        "growth", texts, ["even" if i % 2 else "odd" for i in range(16)], splits=["train"] * 16
    )


def fit_at(backbone, name: str, number: int):
    """A lane that stands at the given task of its stream, ready to take a step."""
    settings = make_settings(
        queue_size=QUEUE_SIZE, prompt_length=PROMPT_LENGTH, shared_length=PROMPT_LENGTH,
        batch_size=BATCH, shots=8, memory_factor=0.01,
    )  # fmt: skip
    method = make_method(name, backbone, *settings)
    state = method.start(0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(number - 1):
        queue = state.queue.with_room(generator)
        fresh = 0.05 * torch.randn(PROMPT_LENGTH, backbone.embed_dim, generator=generator)
        queue = queue.append(fresh)
        layout = torch.cat([state.shared_prefix, queue.rows])
        state = replace(state, queue=queue, learnt=state.learnt + 1, last_layout=layout)
    task = build_task()
    lane = method.lane(state, task, task.split(8))
    return Fit(lane, method.train), Pack(backbone, [lane], method.train)


def measure() -> list[dict[str, float | int | str]]:
    """One entry per method and task number; methods and tasks are interleaved in every round."""
    backbone = build_backbone()
    places = [(name, number) for number in TASKS for name in ("q-tuning", "prog-prompt")]
    fits = {place: fit_at(backbone, *place) for place in places}
    times: dict[tuple[str, int], list[float]] = {place: [] for place in places}
    for repeat in range(REPEATS + 2):
        for place in places:
            fit, pack = fits[place]
            batch = fit.next_batch()
            began = time.perf_counter()
            pack.step([batch], [fit.step])
            if repeat >= 2:  # the first two warm up
                times[place].append(time.perf_counter() - began)
    found = []
    for place in places:
        gc.collect()
        with PeakBytes() as memory:
            fit, pack = fits[place]
            pack.step([fit.next_batch()], [fit.step])
        found.append(
            {
                "method": place[0],
                "task": place[1],
                "prompt_rows": len(fit.lane.layout(fit.lane.tensors)),
                "step_ms": round(1000 * statistics.median(times[place]), 2),
                "peak_tensor_mib": round(memory.peak / 2**20, 2),
            }
        )
    return found


def draw(entries: list[dict], path: Path) -> None:
    """Three panels, one line per method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {
        "prompt_rows": "prompt vectors",
        "step_ms": "one training step (ms)",
        "peak_tensor_mib": "peak memory of a step (MiB)",
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4))
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for name, colour in (("q-tuning", "#1b7f5c"), ("prog-prompt", "#c2543d")):
            own = [entry for entry in entries if entry["method"] == name]
            axis.plot(
                [e["task"] for e in own], [e[key] for e in own], "o-", color=colour, label=name
            )
        axis.set(title=title, xlabel="task number")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.suptitle(f"Cost of one more task, queue of {QUEUE_SIZE} prompts", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, write JSON and picture, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    output = parser.parse_args().output
    torch.set_num_threads(2)
    entries = measure()
    record = {
        "what": "cost of one training step at tasks 5, 20 and 60 of a stream",
        "command": "make growth",
        "date": date.today().isoformat(),
        "device": f"CPU, {torch.get_num_threads()} threads",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "backbone": "BERT, 4 layers, hidden 128, random weights, float32",
        "setting": {
            "queue_size": QUEUE_SIZE,
            "prompt_length": PROMPT_LENGTH,
            "shared_length": PROMPT_LENGTH,
            "batch_size": BATCH,
            "text_tokens": 32,
            "steps_timed": REPEATS,
        },
        "memory": "most bytes alive at once among tensors made during one step",
        "results": entries,
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "growth.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(entries, output / "growth.png")
    for entry in entries:
        print(entry)


if __name__ == "__main__":
    main()
