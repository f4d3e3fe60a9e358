"""Mixed-task prediction: every text may belong to another task, all share the same passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from qtuning.backbones import Backbone, Tokens
from qtuning.errors import TaskError, unknown
from qtuning.scoring import Answerer, Query, exact_matches, score
from qtuning.snapshots import Snapshot, answering, answers_from_snapshots
from qtuning.tasks import Text

Found = TypeVar("Found")


class Predictor:
    """Answers texts with the snapshots of a collection on one frozen backbone."""

    def __init__(self, backbone: Backbone, snapshots: Mapping[str, Snapshot]):
        self.backbone, self.snapshots = backbone, dict(snapshots)
        self._answerers: dict[str, Answerer] = {}

    def log_probs(self, texts: Sequence[Text], tasks: Sequence[str]) -> list[Tensor]:
        """Log-probabilities [labels of its task] for each text."""
        return score(self.backbone, self.queries(texts, tasks))

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
        return exact_matches(self.backbone, self.queries(texts, tasks), gold, max_tokens)

    def queries(self, texts: Sequence[Text], tasks: Sequence[str]) -> list[Query]:
        """Each text, tokenised for its task."""
        found: dict[int, Query] = {}
        for name in dict.fromkeys(tasks):
            places = [i for i, task in enumerate(tasks) if task == name]
            answerer = self._answerer(name)
            tokens = self._tokens(name, [texts[i] for i in places], answerer)
            found |= {i: Query(answerer, each) for i, each in zip(places, tokens, strict=True)}
        return [found[i] for i in range(len(texts))]

    def _answerer(self, name: str) -> Answerer:
        if name not in self.snapshots:
            raise TaskError(unknown("task", name, self.snapshots))
        if name not in self._answerers:
            self._answerers[name] = self.snapshots[name].answerer(self.backbone)
        return self._answerers[name]

    def _tokens(self, name: str, texts: Sequence[Text], answerer: Answerer) -> list[Tokens]:
        is_pair = self.snapshots[name].card.is_pair
        check_texts(texts)
        for text in texts:
            parts = text if isinstance(text, tuple) else (text,)
            if isinstance(text, tuple) != is_pair or len(parts) > 2:
                wanted = (
                    "pairs of texts: pass a tuple of two, or --text-b"
                    if is_pair
                    else "single texts: pass a string, without --text-b"
                )
                raise TaskError(f"task {name!r} takes {wanted}, got {text!r}.")
        return self.backbone.tokenize(texts, len(answerer.layout), answerer.answers.longest)


def check_texts(texts: Sequence[Text]) -> None:
    """Refuse what is no text."""
    for text in texts:
        parts = text if isinstance(text, tuple) else (text,)
        if not all(isinstance(part, str) and part.strip() for part in parts):
            raise TaskError(f"a text to predict must be a non-empty string, got {text!r}.")


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
        ask: Callable[[Predictor, list[Text], str, list[int]], list[Found]],
    ) -> list[Found]:
        """The answers to all texts, from a predictor for each task or for each text."""
        found: dict[int, Found] = {}
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


def make_predictor(backbone: Backbone, state: Any) -> Predictor:
    """The predictor that a state needs."""
    if answers_from_snapshots(state):
        return Predictor(backbone, state.snapshots)
    return RoutedPredictor(backbone, state)
