"""A server in memory that answers as the real one does, and teaches in a second, for tests of the page alone."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

import qtuning

PAGE = Path(qtuning.__file__).parent / "serve" / "page"
POLICY = "default-src 'self'"
EPOCHS = 15
SECONDS_PER_EPOCH = 0.1
ENDED = ("stopped", "done", "failed")
WORDS: dict[str, dict[str, str]] = {
    "intent-delivery": {
        "track_parcel": "where parcel track package arrive",
        "change_address": "address moved street deliver instead",
        "missing_item": "missing box empty item not inside",
        "damaged": "broken damaged crushed torn cracked",
    },
    "tone": {
        "polite": "please thank thanks kindly would",
        "rude": "useless stupid rubbish idiots now",
    },
    "urgency": {
        "can_wait": "whenever sometime later hurry",
        "urgent": "now today immediately urgent asap",
    },
    "entailment": {
        "follows": "so therefore same",
        "contradicts": "not never no",
        "neither": "maybe",
    },
    "intent-bank": {
        name: name.replace("_", " ")
        for name in (
            "block_card", "open_account", "close_account", "transfer_abroad", "lost_card", "exchange_rate",
            "balance", "direct_debit", "change_pin", "card_declined", "loan_offer", "refund",
        )
    },
    "spam": {"spam": "win free prize click offer cash", "fine": "meeting lunch tomorrow report"},
}  # fmt: skip
PAIRS = {"entailment"}


class World:
    """What the server knows: tasks in order, teachings in order."""

    def __init__(self) -> None:
        """Starts with six tasks taught."""
        self.words = {name: dict(labels) for name, labels in WORDS.items()}
        self.tasks = {
            name: entry(name, list(labels), 0.97 - 0.05 * i, name in PAIRS)
            for i, (name, labels) in enumerate(WORDS.items())
        }
        self.teachings: dict[str, dict[str, Any]] = {}
        self.jobs: dict[str, asyncio.Task[None]] = {}

    def begin(self, name: str, rows: list[dict[str, str]]) -> dict[str, Any]:
        found: dict[str, str] = {}
        for row in rows:
            label = row["label"]
            found[label] = f"{found.get(label, '')} {row['text'].lower()}"
        number = f"t{len(self.teachings) + 1}"
        self.teachings[number] = {
            "id": number, "task": name, "state": "waiting", "epoch": 0, "epochs": EPOCHS, "loss": None,
            "validation": None, "best": None, "message": "", "result": None, "_words": found,
        }  # fmt: skip
        self.start(number)
        return shown(self.teachings[number])

    def start(self, number: str) -> None:
        self.teachings[number]["state"] = "waiting"
        self.jobs[number] = asyncio.create_task(self.learn(self.teachings[number]))

    async def learn(self, teaching: dict[str, Any]) -> None:
        await asyncio.sleep(SECONDS_PER_EPOCH)
        while teaching["epoch"] < EPOCHS:
            if teaching["state"] == "stopped":
                return
            epoch = teaching["epoch"] + 1
            score = 0.94 - 0.5 * math.exp(-epoch / 4) + 0.03 * math.sin(epoch)
            teaching |= {
                "state": "running", "epoch": epoch, "loss": 1.2 * math.exp(-epoch / 6), "validation": score,
                "best": max(score, teaching["best"] or 0),
            }  # fmt: skip
            await asyncio.sleep(SECONDS_PER_EPOCH)
        name, words = teaching["task"], teaching["_words"]
        version = self.tasks[name]["version"] + 1 if name in self.tasks else 1
        self.words[name] = words
        self.tasks[name] = entry(name, sorted(words), teaching["best"], False, version)
        teaching |= {"state": "done", "result": self.tasks[name]}

    def answer(self, text: str, task: str | None) -> dict[str, Any]:
        heard = set("".join(c if c.isalnum() else " " for c in text.lower()).split())
        similarity = None
        if task is None:
            overlaps = {
                name: len(heard & set(" ".join(labels.values()).split()))
                for name, labels in self.words.items()
            }
            task = max(overlaps, key=lambda name: overlaps[name]) if overlaps else None
            similarity = round(min(0.95, 0.2 + 0.18 * overlaps.get(task or "", 0)), 3)
            if similarity < 0.3:
                return {
                    "task": None,
                    "label": "unknown",
                    "score": None,
                    "probabilities": {},
                    "similarity": similarity,
                }
        assert task is not None
        scores = {
            label: math.exp(1.4 * len(heard & set(words.split())))
            for label, words in self.words[task].items()
        }
        total = sum(scores.values())
        probabilities = {label: score / total for label, score in scores.items()}
        best = max(probabilities, key=lambda label: probabilities[label])
        return {
            "task": task,
            "label": best,
            "score": probabilities[best],
            "probabilities": probabilities,
            "similarity": similarity,
        }


def entry(name: str, labels: list[str], score: float, is_pair: bool, version: int = 1) -> dict[str, Any]:  # fmt: skip
    return {
        "name": name, "labels": labels, "is_pair": is_pair, "metric": "accuracy", "version": version,
        "validation_score": score, "test_score": score - 0.04 if name in WORDS else None,
        "seconds": 12.0 + 2.3 * len(labels), "has_key": not is_pair,
    }  # fmt: skip


def shown(teaching: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in teaching.items() if not key.startswith("_")}


def read_file(name: str, content: bytes) -> list[dict[str, str]]:
    text = content.decode("utf-8-sig")
    if name.endswith(".jsonl"):
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        reader = csv.DictReader(io.StringIO(text), delimiter="\t" if name.endswith(".tsv") else ",")
        rows = list(reader)
    for number, row in enumerate(rows, start=1):
        if not row.get("text", "").strip():
            raise HTTPException(
                422, f"{name}, row {number}: the text is empty; fill it or leave the row out."
            )
    return rows


def build() -> FastAPI:
    """The server with a world of its own."""
    world = World()
    app = FastAPI()

    @app.middleware("http")
    async def add_policy(request: Request, answer: Any) -> Response:
        response: Response = await answer(request)
        response.headers["Content-Security-Policy"] = POLICY
        return response

    @app.get("/v1/tasks")
    def tasks() -> dict[str, Any]:
        return {"model": "minilm", "method": "q-tuning", "tasks": list(world.tasks.values())}

    @app.post("/v1/classify")
    async def classify(request: Request) -> dict[str, Any]:
        body = await request.json()
        inputs, task = body["inputs"], body["task"]
        names = task if isinstance(task, list) else [task] * len(inputs)
        for name in names:
            if name is not None and name not in world.tasks:
                raise HTTPException(
                    404, f"there is no task {name!r}; taught are {', '.join(world.tasks)}."
                )
        texts = [" ".join(text) if isinstance(text, list) else text for text in inputs]
        return {
            "answers": [world.answer(text, name) for text, name in zip(texts, names, strict=True)]
        }

    @app.get("/v1/queue")
    def queue() -> dict[str, Any]:
        names = list(world.tasks)
        kept = [round(max(0.0, 1 - 0.17 * max(0, len(names) - 4 - i)), 3) for i in range(len(names))]  # fmt: skip
        scales = [
            {
                "task": name,
                "values": [
                    round(1 + 0.09 * math.sin(1.7 * i + 0.9 * j), 4)
                    for j in range(10 * min(i + 1, 4))
                ],
            }
            for i, name in enumerate(names)
        ]
        similarity = [
            [
                None if first in PAIRS or second in PAIRS
                else 1.0 if first == second
                else round(0.35 + 0.4 * math.cos(i * j + i + j), 3)
                for j, second in enumerate(names)
            ]
            for i, first in enumerate(names)
        ]  # fmt: skip
        return {
            "tasks": names,
            "queue_size": 4,
            "kept": kept,
            "scales": scales,
            "similarity": similarity,
        }

    @app.post("/v1/tasks", status_code=202)
    async def teach(request: Request) -> dict[str, Any]:
        if request.headers["content-type"].startswith("multipart/"):
            form = await request.form()
            name, replace = str(form["name"]), form.get("replace") == "true"
            file: Any = form["file"]
            rows = read_file(file.filename, await file.read())
        else:
            body = await request.json()
            name, replace, rows = body["name"], body.get("replace", False), body["examples"]
        if name in world.tasks and not replace:
            raise HTTPException(
                409, f"there is a task {name!r} already; send replace to teach it anew."
            )
        return world.begin(name, rows)

    @app.get("/v1/teachings")
    def teachings() -> dict[str, Any]:
        return {"teachings": [shown(teaching) for teaching in world.teachings.values()]}

    @app.get("/v1/teachings/{number}")
    def teaching(number: str) -> dict[str, Any]:
        return shown(world.teachings[number])

    @app.get("/v1/teachings/{number}/events")
    async def events(number: str) -> StreamingResponse:
        async def stream() -> AsyncIterator[str]:
            before = ""
            while True:
                teaching = shown(world.teachings[number])
                data = json.dumps(teaching)
                if data != before:
                    yield f"event: progress\ndata: {data}\n\n"
                before = data
                if teaching["state"] in ENDED:
                    return
                await asyncio.sleep(SECONDS_PER_EPOCH / 3)

        return StreamingResponse(stream(), media_type="text/event-stream")

    @app.post("/v1/teachings/{number}/cancel")
    async def cancel(number: str) -> dict[str, Any]:
        world.teachings[number]["state"] = "stopped"
        return shown(world.teachings[number])

    @app.post("/v1/teachings/{number}/continue")
    async def go_on(number: str) -> dict[str, Any]:
        await world.jobs[number]
        world.start(number)
        return shown(world.teachings[number])

    @app.delete("/v1/tasks/{name}")
    def remove(name: str) -> Response:
        if name not in world.tasks:
            return JSONResponse({"detail": f"there is no task {name!r}."}, status_code=404)
        del world.tasks[name], world.words[name]
        note = "What the queue and the shared prefix learnt from it stays in them."
        return JSONResponse({"removed": name, "note": note})

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    app.mount("/page", StaticFiles(directory=PAGE))
    return app
