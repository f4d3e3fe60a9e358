"""What goes in and out over HTTP; FastAPI checks it and describes it in OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MOST_INPUTS = 512
LONGEST_TEXT = 100_000
MOST_EXAMPLES = 50_000

Words = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_TEXT)]
Pair = Annotated[list[Words], Field(min_length=2, max_length=2)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ClassifyBody(_Strict):
    """Texts to be labelled."""

    inputs: Annotated[list[Words | Pair], Field(min_length=1, max_length=MOST_INPUTS)]
    """Texts; a pair of texts is a list of two."""
    task: Name | list[Name | None] | None = None
    """Of all of them, of each of them, or none: then it is found."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"inputs": ["Where is my parcel?"], "task": "intent-delivery"},
                {"inputs": ["Where is my parcel?", "Lovely soup."], "task": None},
            ]
        },
    )


class AnswerOut(BaseModel):
    """What is said of one text."""

    task: str | None
    label: str
    score: float | None
    probabilities: dict[str, float]
    similarity: float | None


class ClassifyOut(BaseModel):
    """One answer for each input."""

    answers: list[AnswerOut]


class TaskOut(BaseModel):
    """A task that is known."""

    name: str
    labels: list[str]
    is_pair: bool
    metric: str
    version: int
    validation_score: float | None
    test_score: float | None
    seconds: float | None
    has_key: bool


class TasksOut(BaseModel):
    """All of them."""

    model: str
    method: str
    tasks: list[TaskOut]


class Example(_Strict):
    """A labelled text."""

    text: Words
    label: Annotated[str, StringConstraints(min_length=1, max_length=500)]
    text_b: Words | None = None


class TeachBody(_Strict):
    """A task to be taught."""

    name: Name
    examples: Annotated[list[Example], Field(min_length=2, max_length=MOST_EXAMPLES)]
    replace: bool = False

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "name": "refunds",
                    "examples": [
                        {"text": "Where is my money?", "label": "late"},
                        {"text": "You sent too much back.", "label": "wrong amount"},
                    ],
                }
            ]
        },
    )


class TeachingOut(BaseModel):
    """A task being taught."""

    id: str
    task: str
    state: str
    epoch: int
    epochs: int
    loss: float | None
    validation: float | None
    best: float | None
    message: str
    result: dict[str, Any] | None


class TeachingsOut(BaseModel):
    """All of them, oldest first."""

    teachings: list[TeachingOut]


class RemovedOut(BaseModel):
    """A task that was removed, and what stays of it."""

    removed: str
    note: str


class QueueOut(BaseModel):
    """What the queue remembers."""

    tasks: list[str]
    queue_size: int
    kept: list[float | None]
    scales: list[dict[str, Any]]
    similarity: list[list[float | None]]


class Problem(BaseModel):
    """Why a request was refused."""

    detail: str
