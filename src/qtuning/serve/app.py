"""The HTTP app: thin routes over `Service` and `Batcher`."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.sse import format_sse_event
from fastapi.staticfiles import StaticFiles
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from qtuning import __version__
from qtuning.errors import QTuningError, TaskError
from qtuning.serve.batching import MOST_WAITING, ROWS_AT_ONCE, Batcher, Busy
from qtuning.serve.guards import Guard
from qtuning.serve.metrics import Metrics
from qtuning.serve.overview import queue_of, tasks_of
from qtuning.serve.schemas import (
    ClassifyBody,
    ClassifyOut,
    Problem,
    QueueOut,
    RemovedOut,
    TasksOut,
    TeachBody,
    TeachingOut,
    TeachingsOut,
)
from qtuning.serve.service import STAYS, Service, Taken, TooMany
from qtuning.serve.teaching import ENDED, read_teaching
from qtuning.tasks import Task, Text

log = logging.getLogger("qtuning.serve")
LOOK_SECONDS = 1.0
"""Between two looks at whether another process changed the collection."""
RETRY = {"Retry-After": "1"}
TeachingId = Annotated[str, InPath(max_length=64)]
TaskName = Annotated[str, InPath(max_length=200)]
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in (400, 401, 403, 404, 408, 409, 413, 422, 429)
}


@dataclass(frozen=True)
class Limits:
    """What a server takes."""

    token: str | None = None
    """Asked for changes."""
    is_private: bool = False
    """Asked for everything."""
    hosts: tuple[str, ...] = ()
    """Names under which it may be asked; all where empty."""
    most_bytes: int = 8 * 2**20
    body_seconds: float = 15.0
    answer_seconds: float = 60.0
    rows_at_once: int = ROWS_AT_ONCE
    most_waiting: int = MOST_WAITING


@dataclass
class Desk:
    """What the routes work with."""

    service: Service
    limits: Limits
    metrics: Metrics = field(default_factory=Metrics)
    is_closing: bool = False

    def __post_init__(self) -> None:
        limits = self.limits
        self.batcher = Batcher(
            self.service.answer, self.metrics.rows.observe, limits.rows_at_once, limits.most_waiting
        )
        gauge = self.metrics.gauge
        gauge("waiting_rows", "Accepted texts without an answer.", lambda: self.batcher.waiting)
        gauge("tasks", "Tasks that are known.", lambda: len(self.service.predictor.snapshots))

    def close(self) -> None:
        """Answer what was accepted; a teaching stops after its epoch and can be continued."""
        self.is_closing = True
        self.batcher.close()
        self.service.close()


def make_app(service: Service, limits: Limits | None = None) -> FastAPI:
    """The app of one open collection; its `state.desk` is closed when the app shuts down."""
    desk = Desk(service, limits or Limits())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        look = asyncio.create_task(_follow(desk))
        yield
        look.cancel()
        await asyncio.to_thread(desk.close)

    app = FastAPI(
        title="qtuning",
        version=__version__,
        description="Few-shot text tasks on one frozen model: answer, teach, remove.",
        lifespan=lifespan,
        responses=PROBLEMS,
        docs_url=None,  # pages whose scripts come from elsewhere, which ours may not load
        redoc_url=None,
    )
    app.state.desk = desk
    own = desk.limits
    app.add_middleware(
        Guard,
        metrics=desk.metrics,
        token=own.token,
        is_private=own.is_private,
        hosts=own.hosts,
        most_bytes=own.most_bytes,
        body_seconds=own.body_seconds,
    )
    _say_problems_in_one_line(app)
    _add_answering(app, desk)
    _add_teaching(app, desk)
    _add_health(app, desk)
    page = Path(str(files("qtuning") / "serve" / "page"))
    app.mount("/page", StaticFiles(directory=page), name="page")

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response((page / "index.html").read_bytes(), media_type="text/html")

    return app


async def _follow(desk: Desk) -> None:
    """Other processes may change the collection: look now and then, whatever came of the last look."""
    said = ""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            await asyncio.to_thread(desk.service.refresh)
            said = ""
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            if cause != said:  # once, not at every look
                is_unexpected = not isinstance(error, QTuningError | OSError)
                log.warning("answers stay as they were: %s", cause, exc_info=is_unexpected)
            said = cause


def _say_problems_in_one_line(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": _first_line(error.errors())}, 422)

    @app.exception_handler(QTuningError)
    async def refused(_: Request, error: QTuningError) -> JSONResponse:
        if isinstance(error, Busy | TooMany):
            return JSONResponse({"detail": str(error)}, 429, RETRY)
        said = str(error)
        is_absent = said.startswith(("Unknown task", "Unknown teaching"))
        status = 409 if isinstance(error, Taken) else 404 if is_absent else 422
        return JSONResponse({"detail": said}, status)


def _first_line(errors: Any) -> str:
    """What pydantic says of the first thing that is wrong."""
    first = errors[0]
    where = ".".join(str(part) for part in first.get("loc", ()) if part != "body")
    return f"{where or 'body'}: {first.get('msg', 'invalid')}"


# ── answering ────────────────────────────────────────────────────────────────────────────────


def _add_answering(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/classify", response_model=ClassifyOut, tags=["answering"])
    async def classify(body: ClassifyBody) -> Response:
        """Label texts; of one task, of a task for each, or of tasks that are found."""
        texts: list[Text] = [(t[0], t[1]) if isinstance(t, list) else t for t in body.inputs]
        tasks = body.task if isinstance(body.task, list) else [body.task] * len(texts)
        if len(tasks) != len(texts):
            raise TaskError(f"{len(texts)} inputs but {len(tasks)} tasks; give one for each.")
        future = asyncio.wrap_future(desk.batcher.submit(texts, tasks))
        try:
            answers = await asyncio.wait_for(future, desk.limits.answer_seconds)
        except TimeoutError:
            raise HTTPException(429, "no answer in time; try again later.", RETRY) from None
        found = [
            {
                "task": answer.task,
                "label": answer.label,
                "score": max(answer.probabilities.values(), default=None),
                "probabilities": answer.probabilities,
                "similarity": answer.similarity,
            }
            for answer in answers
        ]
        return Response(json.dumps({"answers": found}), media_type="application/json")

    @app.get("/v1/tasks", response_model=TasksOut, tags=["answering"])
    async def tasks() -> dict[str, Any]:
        """What it knows."""
        return tasks_of(desk.service.tuner)

    @app.get("/v1/queue", response_model=QueueOut, tags=["answering"])
    def queue() -> dict[str, Any]:
        """What the queue remembers of each task."""
        return queue_of(desk.service.tuner)


# ── teaching ─────────────────────────────────────────────────────────────────────────────────


def _upload() -> dict[str, Any]:
    """The two ways to send a task, for OpenAPI."""
    body = TeachBody.model_json_schema()
    body["properties"]["examples"]["items"] = body.pop("$defs")["Example"]
    fields = {
        "file": {"type": "string", "format": "binary"},
        "name": {"type": "string"},
        "replace": {"type": "boolean"},
    }
    form = {"type": "object", "required": ["file"], "properties": fields}
    content = {"application/json": {"schema": body}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


def _add_teaching(app: FastAPI, desk: Desk) -> None:
    service = desk.service

    @app.post(
        "/v1/tasks",
        status_code=202,
        response_model=TeachingOut,
        tags=["teaching"],
        openapi_extra=_upload(),
    )
    async def teach(request: Request) -> dict[str, Any]:
        """Teach a task from JSON, or from an uploaded CSV, TSV or JSONL file with the columns text and label."""
        task, replace = await _task_of(request)
        return (await asyncio.to_thread(service.teach, task, replace)).facts()

    @app.delete("/v1/tasks/{name}", response_model=RemovedOut, tags=["teaching"])
    async def remove(name: TaskName) -> dict[str, Any]:
        """Forget a task's snapshot and key."""
        await asyncio.to_thread(service.remove, name)
        return {"removed": name, "note": STAYS}

    @app.get("/v1/teachings", response_model=TeachingsOut, tags=["teaching"])
    async def teachings() -> dict[str, Any]:
        """Tasks that are, were or wait to be taught."""
        found = await asyncio.to_thread(service.teachings)
        return {"teachings": [t.facts() for t in found.values()]}

    @app.get("/v1/teachings/{id}", response_model=TeachingOut, tags=["teaching"])
    async def teaching(id: TeachingId) -> dict[str, Any]:
        """One of them."""
        return service.teaching(id).facts()

    @app.delete("/v1/teachings/{id}", response_model=RemovedOut, tags=["teaching"])
    async def forget(id: TeachingId) -> dict[str, Any]:
        """Give up one that has ended, and what was uploaded for it."""
        await asyncio.to_thread(service.forget, id)
        return {"removed": id, "note": ""}

    @app.get("/v1/teachings/{id}/events", tags=["teaching"], response_class=StreamingResponse)
    async def events(id: TeachingId) -> StreamingResponse:
        """Its progress as server-sent events, until it ends."""
        service.teaching(id)  # an unknown one is refused before the stream begins
        return StreamingResponse(_progress(desk, id), media_type="text/event-stream")

    @app.post("/v1/teachings/{id}/cancel", response_model=TeachingOut, tags=["teaching"])
    async def cancel(id: TeachingId) -> dict[str, Any]:
        """Stop after the epoch under way."""
        return (await asyncio.to_thread(service.cancel, id)).facts()

    @app.post("/v1/teachings/{id}/continue", response_model=TeachingOut, tags=["teaching"])
    async def go_on(id: TeachingId) -> dict[str, Any]:
        """Go on with one that was stopped."""
        return (await asyncio.to_thread(service.go_on, id)).facts()


async def _progress(desk: Desk, name: str) -> AsyncIterator[str]:
    seen: dict[str, Any] = {}
    while not desk.is_closing:
        found = read_teaching(desk.service.folder, name)
        if found is None:
            return  # someone gave it up
        facts = found.facts()
        if facts != seen:
            seen = facts
            yield format_sse_event(data_str=json.dumps(facts), event="progress").decode()
            if facts["state"] in ENDED:
                return
        await asyncio.sleep(0.1)


async def _task_of(request: Request) -> tuple[Task, bool]:
    """The uploaded task, and whether it may replace one of that name."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await _task_of_form(request)
    if kind not in ("application/json", ""):
        raise HTTPException(422, f"send application/json or multipart/form-data, not {kind!r}.")
    try:
        body = TeachBody.model_validate_json(await request.body())
    except ValidationError as error:
        raise HTTPException(422, _first_line(error.errors(include_url=False))) from None
    texts = [(e.text, e.text_b) if e.text_b is not None else e.text for e in body.examples]
    labels = [e.label for e in body.examples]
    return await asyncio.to_thread(Task, body.name, texts, labels), body.replace


async def _task_of_form(request: Request) -> tuple[Task, bool]:
    async with request.form(max_files=1, max_fields=8) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise HTTPException(422, "file: send a CSV, TSV or JSONL file in the field 'file'.")
        given = PurePath(file.filename or "task.csv")
        data = await file.read()
        name, replace = str(form.get("name") or given.stem), str(form.get("replace") or "")
    ending = given.suffix.lower() if given.suffix.lower() in (".csv", ".tsv", ".jsonl") else ".csv"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"upload{ending}"
        copy.write_bytes(data)
        task = await asyncio.to_thread(Task.from_file, copy, name)
    return task, replace.lower() in ("true", "1", "on", "yes")


# ── health ───────────────────────────────────────────────────────────────────────────────────


def _add_health(app: FastAPI, desk: Desk) -> None:
    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """It runs; `process` tells replicas apart."""
        return {"status": "ok", "process": desk.service.process}

    @app.get("/readyz", tags=["health"])
    async def readyz() -> JSONResponse:
        """It takes requests."""
        ready = not desk.is_closing
        return JSONResponse({"status": "ready" if ready else "closing"}, 200 if ready else 503)

    @app.get("/metrics", tags=["health"], include_in_schema=False)
    async def metrics() -> Response:
        return Response(desk.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
