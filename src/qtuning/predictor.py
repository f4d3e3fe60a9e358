"""Mixed-task prediction: every text may belong to another task, all share the same passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, TypeVar

from torch import Tensor

from qtuning.backbones import Backbone, Tokens
from qtuning.backbones.prefixes import PromptMemory
from qtuning.errors import TaskError, unknown
from qtuning.keys import Finder, Found, keys_of, read_features
from qtuning.scoring import Answerer, AnswererTable, Query, exact_matches
from qtuning.snapshots import Snapshot, answering, answers_from_snapshots
from qtuning.tasks import Text, check_whole

UNKNOWN = "unknown"
"""The label of a text that is of no known task."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Answer:
    """What is said of one text."""

    task: str | None
    """None for a text of no known task."""
    similarity: float | None
    """To the nearest task's key, at most 1; None where the task was told."""
    label: str
    probabilities: dict[str, float]


class Predictor:
    """Answers texts with the snapshots of a collection on one frozen backbone.

    A predictor never changes, so any number of threads may ask it; a task more or less is another predictor, which
    takes over what this one has prepared (`before`).
    """

    def __init__(
        self,
        backbone: Backbone,
        snapshots: Mapping[str, Snapshot],
        before: Predictor | None = None,
    ):
        self.backbone, self.snapshots = backbone, dict(snapshots)
        self._answerers: dict[str, Answerer] = {}
        self._memory = PromptMemory(backbone.read_prompt) if backbone.remembers_prompts else None
        if before is not None and before.backbone is backbone:
            self._answerers = {
                name: answerer
                for name, answerer in before._answerers.items()
                if self.snapshots.get(name) is before.snapshots[name]
            }
            self._memory = before._memory
        self._table: AnswererTable | None = None
        self._number = {name: i for i, name in enumerate(self.snapshots)}
        self._preparing = Lock()
        self._finder = cache(lambda is_pair: Finder(keys_of(self.snapshots, is_pair)))

    def prepare(self) -> AnswererTable:
        """All tasks' prompts and heads on the device; done once, at the first question if not before."""
        with self._preparing:
            if self._table is None:
                table = AnswererTable([self._answerer(name) for name in self.snapshots])
                if self._memory and self.snapshots:
                    table.remember_prompts(self._memory)
                self._table = table
            return self._table

    def answer(self, texts: Sequence[Text], tasks: Sequence[str | None]) -> list[Answer]:
        """Label and probabilities of each text; where the task is None it is found first, or the text is `unknown`."""
        open_places = [i for i, task in enumerate(tasks) if task is None]
        searched = dict(
            zip(open_places, self.find_tasks([texts[i] for i in open_places]), strict=True)
        )
        names = list(tasks)
        for i, found in searched.items():
            names[i] = found.task if found.is_known else None
        asked = [i for i, name in enumerate(names) if name is not None]
        shares = dict(zip(asked, self.probabilities([texts[i] for i in asked],
                                                    [str(names[i]) for i in asked]), strict=True))  # fmt: skip
        answers = []
        for i, name in enumerate(names):
            similarity = searched[i].similarity if i in searched else None
            own = shares.get(i, {})
            label = max(own, key=own.__getitem__) if own else UNKNOWN
            answers.append(Answer(name, similarity, label, own))
        return answers

    def probabilities(self, texts: Sequence[Text], tasks: Sequence[str]) -> list[dict[str, float]]:
        """By label, for each text."""
        return [
            dict(zip(self.snapshots[name].card.label_names, found.exp().tolist(), strict=True))
            for name, found in zip(tasks, self.log_probs(texts, tasks), strict=True)
        ]

    def find_tasks(self, texts: Sequence[Text]) -> list[Found]:
        """The task of each text, by the keys that were learnt with the tasks."""
        if not texts:
            return []
        check_texts(texts)
        keyless = [name for name, s in self.snapshots.items() if s.key is None]
        if keyless:
            raise TaskError(
                f"say which task (task=…, --task): {', '.join(keyless)} has no key; learn it again, or give "
                f"add_prompt some of its texts."
            )
        if not self.snapshots:
            raise TaskError("no task was learnt yet; teach one first (learn, qtuning learn).")
        found: dict[int, Found] = {}
        for is_pair in {isinstance(text, tuple) for text in texts}:
            finder = self._finder(is_pair)
            if not finder.names:
                raise TaskError(f"no task takes {'pairs of texts' if is_pair else 'single texts'}.")
            places = [i for i, text in enumerate(texts) if isinstance(text, tuple) == is_pair]
            features = read_features(self.backbone, [texts[i] for i in places])
            found |= dict(zip(places, finder.find(features), strict=True))
        return [found[i] for i in range(len(texts))]

    def log_probs(self, texts: Sequence[Text], tasks: Sequence[str]) -> list[Tensor]:
        """Log-probabilities [labels of its task] for each text."""
        if not texts:
            return []
        tokens = self._tokens(texts, tasks)
        return self.prepare().log_probs(self.backbone, tokens, [self._number[t] for t in tasks])

    def exact_matches(
        self,
        texts: Sequence[Text],
        tasks: Sequence[str],
        gold: Sequence[int],
        max_tokens: int | None = None,
    ) -> list[bool]:
        """Whether greedy generation would write exactly the gold label words, for each text."""
        if self.backbone.needs_head:
            raise TaskError(
                f"exact match compares generated label words, and {self.backbone.name!r} is an encoder; "
                f"use match='label'."
            )
        tokens = self._tokens(texts, tasks)
        queries = [
            Query(self._answerer(task), each) for task, each in zip(tasks, tokens, strict=True)
        ]
        return exact_matches(self.backbone, queries, gold, max_tokens)

    def _answerer(self, name: str) -> Answerer:
        if name not in self._answerers:
            self._answerers[name] = self.snapshots[name].answerer(self.backbone)
        return self._answerers[name]

    def _tokens(self, texts: Sequence[Text], tasks: Sequence[str]) -> list[Tokens]:
        """Each text's, all those that leave room for as many other positions in one go."""
        check_texts(texts)
        rooms: dict[tuple[int, int], list[int]] = {}
        for i, (text, name) in enumerate(zip(texts, tasks, strict=True)):
            if name not in self.snapshots:
                raise TaskError(unknown("task", name, self.snapshots))
            _check_kind(text, self.snapshots[name])
            own = self._answerer(name)
            rooms.setdefault((len(own.layout), own.answers.longest), []).append(i)
        found: dict[int, Tokens] = {}
        for room, places in rooms.items():
            tokens = self.backbone.tokenize([texts[i] for i in places], *room)
            found |= dict(zip(places, tokens, strict=True))
        return [found[i] for i in range(len(texts))]


def check_texts(texts: Sequence[Text], what: str = "a text to predict") -> None:
    """Refuse what is no text; `what` says of which one the message is, where that is known."""
    for text in texts:
        parts = text if isinstance(text, tuple) else (text,)
        if not all(isinstance(part, str) and part.strip() for part in parts):
            raise TaskError(
                f"{what} must be a non-empty string, got {text!r}; fill it or leave it out."
            )
        for part in parts:
            check_whole(what, part)


def _check_kind(text: Text, snapshot: Snapshot) -> None:
    """Refuse a pair where a task takes single texts, and the other way round."""
    is_pair = snapshot.card.is_pair
    if isinstance(text, tuple) == is_pair and (not is_pair or len(text) == 2):
        return
    wanted = (
        "pairs of texts: pass a tuple of two, or --text-b"
        if is_pair
        else "single texts: pass a string, without --text-b"
    )
    raise TaskError(f"task {snapshot.card.name!r} takes {wanted}, got {text!r}.")


class RoutedPredictor(Predictor):
    """For methods whose tasks are not all answered by one frozen backbone: task by task."""

    def __init__(self, backbone: Backbone, state: Any):
        super().__init__(backbone, state.snapshots)
        self.state = state

    def log_probs(self, texts: Sequence[Text], tasks: Sequence[str]) -> list[Tensor]:
        """Log-probabilities [labels of its task] for each text."""
        return self._by_task(
            texts,
            tasks,
            lambda one, own, name, _: one.log_probs(own, [name] * len(own)),
        )

    def exact_matches(
        self,
        texts: Sequence[Text],
        tasks: Sequence[str],
        gold: Sequence[int],
        max_tokens: int | None = None,
    ) -> list[bool]:
        """Whether greedy generation would write exactly the gold label words, for each text."""
        return self._by_task(
            texts,
            tasks,
            lambda one, own, name, places: one.exact_matches(
                own, [name] * len(own), [gold[i] for i in places], max_tokens
            ),
        )

    def _by_task(
        self,
        texts: Sequence[Text],
        tasks: Sequence[str],
        ask: Callable[[Predictor, list[Text], str, list[int]], list[Result]],
    ) -> list[Result]:
        """The answers to all texts, from a predictor for each task or for each text."""
        check_texts(texts)  # before a model adapts itself to one
        found: dict[int, Result] = {}
        for name in dict.fromkeys(tasks):
            if name not in self.snapshots:
                raise TaskError(unknown("task", name, self.snapshots))
            own = [i for i, task in enumerate(tasks) if task == name]
            asked = [texts[i] for i in own]
            for backbone, snapshot, some in answering(self.backbone, self.state, name, asked):
                places = [own[i] for i in some]
                one = Predictor(backbone, {name: snapshot})
                answers = ask(one, [texts[i] for i in places], name, places)
                found |= dict(zip(places, answers, strict=True))
        return [found[i] for i in range(len(tasks))]


def make_predictor(backbone: Backbone, state: Any, before: Predictor | None = None) -> Predictor:
    """The predictor that a state needs; it takes over what an earlier one has prepared."""
    if answers_from_snapshots(state):
        return Predictor(backbone, state.snapshots, before)
    return RoutedPredictor(backbone, state)
