"""What mixed batches cost, and how many requests a server takes: perf/results/serving-*.json.

python perf/serving.py mixed --model minilm            many tasks in a batch against one
python perf/serving.py load --model minilm             our server against a plain FastAPI loop, same run
python perf/serving.py load --model tiny
python perf/serving.py soak --model tiny --seconds 600 saturation, with teaching and deleting going on
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
ROWS = 64
TASKS = ("spam", "urgency", "tone", "intent-bank")
WORDS = [
    "please",
    "tell",
    "me",
    "where",
    "my",
    "parcel",
    "is",
    "and",
    "when",
    "the",
    "money",
    "for",
    "it",
    "comes",
    "back",
    "to",
    "my",
    "card",
]


def texts(count: int, words: int = 16, seed: int = 0) -> list[str]:
    """Texts of the same number of words."""
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(WORDS, k=words)) for _ in range(count)]


def facts(args: argparse.Namespace) -> dict:
    """What a figure needs beside it."""
    return {
        "command": " ".join(["python", "perf/serving.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "model": args.model,
        "device": args.device,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "versions": {
            name: version(name) for name in ("torch", "transformers", "fastapi", "uvicorn")
        },
    }


def write(name: str, found: dict) -> None:
    """Keep and show."""
    path = HERE / "results" / f"serving-{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    print("wrote", path)


# ── mixed batches ────────────────────────────────────────────────────────────────────────────


def mixed(args: argparse.Namespace) -> None:
    """One batch of 64 rows: of one task, of 50, of 64 out of 1,000."""
    from qtuning.backbones import Head, load_backbone
    from qtuning.predictor import Predictor
    from qtuning.snapshots import Snapshot, TaskCard

    backbone = load_backbone(model_of(args.model), device=args.device, dtype=args.dtype)
    generator = torch.Generator().manual_seed(0)
    labels = ("negative", "mixed", "positive")

    def snapshot(name: str) -> Snapshot:
        rows = torch.randn(args.prompt, backbone.embed_dim, generator=generator) * 0.02
        head = Head(torch.randn(3, backbone.hidden_dim, generator=generator), torch.zeros(3))
        card = TaskCard(name, labels, {label: label for label in labels}, "accuracy", False)
        return Snapshot(card, rows, head if backbone.needs_head else None)

    many = {f"task{i}": snapshot(f"task{i}") for i in range(1000)}
    few = dict(list(many.items())[:10])
    big, small = Predictor(backbone, many), Predictor(backbone, few)
    rows = texts(ROWS)
    cases = {
        "one of 10": (small, ["task0"] * ROWS),
        "50 of 1,000": (big, [f"task{i % 50}" for i in range(ROWS)]),
        "10 of 10": (small, [f"task{i % 10}" for i in range(ROWS)]),
        "10 of 1,000": (big, [f"task{i % 10}" for i in range(ROWS)]),
        "64 of 1,000": (big, [f"task{i * 15}" for i in range(ROWS)]),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(args.repeats + 2):
        for name, (predictor, tasks) in cases.items():  # in turn, so that drift meets all alike
            began = time.perf_counter()
            predictor.log_probs(rows, tasks)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if i >= 2:
                times[name].append(time.perf_counter() - began)
    ms = {name: round(statistics.median(t) * 1000, 2) for name, t in times.items()}
    fifty = cases["50 of 1,000"][1]
    alone = [big.log_probs([row], [task])[0] for row, task in zip(rows, fifty, strict=True)]
    together = big.log_probs(rows, fifty)
    apart = max(float((a - b).abs().max()) for a, b in zip(alone, together, strict=True))
    found = {
        **facts(args),
        "rows": ROWS,
        "prompt_rows": args.prompt,
        "repeats": args.repeats,
        "median_ms": ms,
        "mixed_over_single": round(ms["50 of 1,000"] / ms["one of 10"], 3),
        "thousand_over_ten": round(ms["10 of 1,000"] / ms["10 of 10"], 3),
        "all_different_over_ten": round(ms["64 of 1,000"] / ms["10 of 10"], 3),
        "largest_difference_to_one_by_one": apart,
    }
    write(f"mixed-{args.model}-{args.device}", found)


# ── load ─────────────────────────────────────────────────────────────────────────────────────


def model_of(name: str) -> str:
    """A short name, or a folder with a tiny random model."""
    if name != "tiny":
        return name
    from tests.conftest import make_model, make_tokenizer

    folder = Path(tempfile.gettempdir()) / "qtuning-tiny-bert"
    if not folder.exists():
        make_model("bert", 0).save_pretrained(folder)
        make_tokenizer("bert").save_pretrained(folder)
    return str(folder)


def make_collection(args: argparse.Namespace, folder: Path) -> Path:
    """Four starter tasks, hardly trained: only speed counts."""
    from qtuning import QTuner
    from qtuning.data import load_task

    tuner = QTuner(
        model_of(args.model), epochs=2, shots=8, prompt_length=5, shared_length=5, queue_size=4
    )
    for name in TASKS:
        tuner.learn(load_task(name), progress=False)
    tuner.save_pretrained(folder)
    return folder


PLAIN = """
import sys
from fastapi import FastAPI, Body
import uvicorn
from qtuning import QTuner
tuner = QTuner.from_pretrained(sys.argv[1])
app = FastAPI()
@app.get("/readyz")
async def ready(): return {}
@app.post("/v1/classify")
async def classify(body: dict = Body()):
    found = tuner.predict_proba(body["inputs"], body["task"])
    return {"answers": [{"label": max(p, key=p.get), "probabilities": p} for p in found]}
uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", access_log=False)
"""


def start(kind: str, folder: Path, port: int) -> subprocess.Popen:
    """A server that answers."""
    ours = ["-c", "from qtuning.cli import main; main()", "serve", str(folder), "--port", str(port)]
    plain = ["-c", PLAIN, str(folder), str(port)]
    process = subprocess.Popen(
        [sys.executable, *(ours if kind == "ours" else plain)], stdout=subprocess.DEVNULL
    )
    import httpx

    for _ in range(600):
        try:
            httpx.get(f"http://127.0.0.1:{port}/readyz")
            return process
        except httpx.HTTPError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


async def ask(port: int, clients: int, seconds: float, tasks: tuple[str, ...] = TASKS) -> dict:
    """So many clients, each with one request at a time; raw sockets, so that the client takes little of the cores."""
    took: list[float] = []
    statuses: dict[int, int] = {}
    end = time.perf_counter() + seconds
    lines = texts(512, 12)

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        drawn = random.Random(number)
        while time.perf_counter() < end:
            body = json.dumps(
                {"inputs": [drawn.choice(lines)], "task": drawn.choice(tasks)}
            ).encode()
            began = time.perf_counter()
            writer.write(
                b"POST /v1/classify HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            took.append(time.perf_counter() - began)
            statuses[status] = statuses.get(status, 0) + 1
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client(i) for i in range(clients)))
    whole = time.perf_counter() - began
    if set(statuses) != {200}:
        raise SystemExit(f"requests were refused, so nothing was measured: {statuses}")
    took.sort()
    return {
        "requests_per_second": round(len(took) / whole, 1),
        "p50_ms": round(took[len(took) // 2] * 1000, 1),
        "p99_ms": round(took[int(len(took) * 0.99)] * 1000, 1),
        "requests": len(took),
        "statuses": statuses,
    }


def load(args: argparse.Namespace) -> None:
    """Ours and a plain loop, in turn, several times."""
    with tempfile.TemporaryDirectory() as folder:
        collection = make_collection(args, Path(folder) / "collection")
        rounds: dict[str, list[dict]] = {"plain": [], "ours": []}
        for number in range(args.rounds):
            for kind, found in rounds.items():
                port = 8700 + 2 * number + (kind == "ours")
                process = start(kind, collection, port)
                asyncio.run(ask(port, args.clients, 3.0))  # warm
                found.append(asyncio.run(ask(port, args.clients, args.seconds)))
                process.terminate()
                process.wait()
    middle = {
        kind: statistics.median(each["requests_per_second"] for each in found)
        for kind, found in rounds.items()
    }
    write(
        f"load-{args.model}-{args.device}",
        {
            **facts(args),
            "clients": args.clients,
            "seconds": args.seconds,
            "cores": os.cpu_count(),
            "rounds": rounds,
            "requests_per_second": middle,
            "ratio": round(middle["ours"] / middle["plain"], 2),
        },
    )


# ── soak ─────────────────────────────────────────────────────────────────────────────────────


def soak(args: argparse.Namespace) -> None:
    """Saturation for long, with teaching and deleting going on: errors, wrong answers, memory."""
    import httpx
    import psutil

    from qtuning import QTuner
    from qtuning.data import load_task

    folder = Path(tempfile.mkdtemp())
    collection = make_collection(args, folder / "collection")
    rows = texts(256, 12)
    tuner = QTuner.from_pretrained(collection)
    expected = {name: tuner.predict_proba(rows, name) for name in TASKS}
    port = 8790
    process = start("ours", collection, port)
    usage, statuses, wrong, taught, removed = [], {}, 0, 0, 0
    end = time.monotonic() + args.seconds
    examples = load_task("feelings")
    pairs = zip(examples.texts, examples.labels, strict=True)
    body = {"examples": [{"text": text, "label": label} for text, label in pairs]}

    async def asker(client: httpx.AsyncClient, number: int) -> None:
        nonlocal wrong
        drawn = random.Random(number)
        while time.monotonic() < end:
            picks = [drawn.randrange(len(rows)) for _ in range(drawn.randint(1, 8))]
            names = [drawn.choice(TASKS) for _ in picks]
            asked = {"inputs": [rows[i] for i in picks], "task": names}
            reply = await client.post("/v1/classify", json=asked)
            statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
            if reply.status_code == 200:
                for i, name, answer in zip(picks, names, reply.json()["answers"], strict=True):
                    right = expected[name][i]
                    far = max(abs(answer["probabilities"][k] - right[k]) for k in right)
                    wrong += far > 1e-4

    async def changer(client: httpx.AsyncClient) -> None:
        nonlocal taught, removed
        number = 0
        while time.monotonic() < end:
            name = f"extra{number}"
            reply = await client.post("/v1/tasks", json={"name": name, **body})
            statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
            teaching = reply.json()["id"]
            while time.monotonic() < end + 60:
                now = (await client.get(f"/v1/teachings/{teaching}")).json()
                if now["state"] in ("done", "failed"):
                    break
                await asyncio.sleep(0.2)
            assert now["state"] == "done", now
            taught += 1
            if number >= 2:
                reply = await client.delete(f"/v1/tasks/extra{number - 2}")
                statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
                removed += reply.status_code == 200
            number += 1

    async def watcher() -> None:
        while time.monotonic() < end:
            usage.append(psutil.Process(process.pid).memory_info().rss / 2**20)
            await asyncio.sleep(5)

    async def whole() -> None:
        limits = httpx.Limits(max_connections=None)
        address = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
            jobs = [asker(client, i) for i in range(args.clients)]
            await asyncio.gather(*jobs, changer(client), watcher())

    asyncio.run(whole())
    process.terminate()
    process.wait()
    kept = QTuner.from_pretrained(collection)
    few = rows[:32]
    same = all(kept.predict_proba(few, name) == tuner.predict_proba(few, name) for name in TASKS)
    shutil.rmtree(folder)
    tenth = max(1, len(usage) // 10)
    write(
        f"soak-{args.model}-{args.device}",
        {
            **facts(args),
            "seconds": args.seconds,
            "clients": args.clients,
            "statuses": statuses,
            "wrong_answers": wrong,
            "taught": taught,
            "removed": removed,
            "old_tasks_identical_on_disk": same,
            "resident_mib": {
                "after_a_tenth": round(usage[tenth]),
                "middle": round(usage[len(usage) // 2]),
                "end": round(usage[-1]),
            },
        },
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("mixed", "load", "soak"))
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--prompt", type=int, default=55)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    {"mixed": mixed, "load": load, "soak": soak}[args.what](args)


if __name__ == "__main__":
    main()
