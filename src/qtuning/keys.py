"""Finding the task of a text: a key per task, learnt with it, in the space of the frozen model's features.

A text's feature (`Backbone.feature`) is what the frozen model makes of it without a prompt, centred and scaled by
what fixed texts of our own give on the same model. A task's key is the direction with the largest mean similarity
(cosine) to its training texts, which is their mean direction. Keys of earlier tasks never change. A text
less similar to its best key than nearly all of that task's validation texts were is of an unknown task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from qtuning.backbones import Backbone, Row
from qtuning.data import load_task
from qtuning.scoring import batches_by_length
from qtuning.snapshots import Snapshot, TaskKey, added
from qtuning.streams import get_stream
from qtuning.tasks import Split, Text

REFERENCE_TEXTS = 8
"""Of every starter task, to centre and scale features by."""
JUDGING_TEXTS = 256
"""Validation texts that a threshold is read from, at most."""
REFUSED = 0.05
"""Share of a task's own validation texts that its threshold calls unknown."""


@dataclass(frozen=True)
class Found:
    """The task of a text, if any is near enough."""

    task: str
    """The nearest, known or not."""
    similarity: float
    is_known: bool


@torch.no_grad()
def read_features(backbone: Backbone, texts: Sequence[Text]) -> Tensor:
    """[n, h] on the CPU: the frozen model's feature of each text, without a prompt."""
    if not texts:
        return torch.zeros(0, backbone.hidden_dim, dtype=backbone.lane_dtype)
    tokens = backbone.tokenize(texts, 0)
    bank = torch.zeros(0, backbone.embed_dim, device=backbone.device)
    found: list[tuple[int, Tensor]] = []
    for places in batches_by_length([len(t.ids) for t in tokens], backbone):
        batch = backbone.assemble(backbone.prepare([Row(tokens[i]) for i in places]), bank)
        found += zip(places, backbone.feature(batch).to("cpu", backbone.lane_dtype), strict=True)
    return torch.stack([feature for _, feature in sorted(found, key=lambda pair: pair[0])])


_references: WeakKeyDictionary[Any, tuple[Tensor, Tensor]] = WeakKeyDictionary()


def reference(backbone: Backbone) -> tuple[Tensor, Tensor]:
    """Mean and spread [h] of the features of fixed texts, within their tasks; read once per model."""
    model = backbone.model
    if model not in _references:
        parts = []
        for name in get_stream("starter").tasks:
            texts = evenly(load_task(name).texts, REFERENCE_TEXTS)
            parts.append(read_features(backbone, texts))
        inside = torch.cat([part - part.mean(dim=0) for part in parts])
        _references[model] = torch.cat(parts).mean(dim=0), inside.std(dim=0).clamp(min=1e-6)
    return _references[model]


def learn_key(backbone: Backbone, split: Split) -> TaskKey:
    """The key of a task from its training texts, its threshold from its validation texts."""
    return learn_keys(backbone, [split])[0]


def learn_keys(backbone: Backbone, splits: Sequence[Split]) -> list[TaskKey]:
    """The same for several at once: runs of one pack share many texts, and each is read once."""
    judging = [evenly(split.validation.texts, JUDGING_TEXTS) for split in splits]
    texts = dict.fromkeys(
        text
        for split, judged in zip(splits, judging, strict=True)
        for text in (*split.train.texts, *judged)
    )
    known = dict(zip(texts, read_features(backbone, list(texts)), strict=True))

    def features(some: Sequence[Text]) -> Tensor:
        return torch.stack([known[text] for text in some])

    return [
        _key(
            features(split.train.texts),
            features(judged) if len(judged) else None,
            *reference(backbone),
        )
        for split, judged in zip(splits, judging, strict=True)
    ]


def _key(train: Tensor, judged: Tensor | None, mean: Tensor, spread: Tensor) -> TaskKey:
    """From features [n, h] of training texts and of those that the threshold is read from."""
    train = directions(train, mean, spread)
    vector = F.normalize(train.mean(dim=0), dim=0)
    judged = train if judged is None else directions(judged, mean, spread)
    threshold = float(torch.quantile(judged @ vector, REFUSED))
    return TaskKey(vector, mean, spread, threshold)


def evenly(texts: Sequence[Text], most: int) -> Sequence[Text]:
    """At most so many of the texts, from all over."""
    return texts[:: max(1, len(texts) // most)][:most]


def directions(features: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Features [n, h], centred, scaled, of unit length."""
    return F.normalize((features - mean) / spread, dim=-1)


def with_key(state: Any, name: str, key: TaskKey) -> Any:
    """The state with a key for a task that it has just learnt."""
    snapshot: Snapshot = replace(state.snapshots[name], key=key)
    return replace(state, snapshots=added(state.snapshots, snapshot))


def keys_of(snapshots: Mapping[str, Snapshot], is_pair: bool) -> dict[str, TaskKey]:
    """The keys of tasks of pairs, or of single texts: a text can only be of its own kind."""
    return {
        name: snapshot.key
        for name, snapshot in snapshots.items()
        if snapshot.key is not None and snapshot.card.is_pair == is_pair
    }


class Finder:
    """All keys, ready to be compared with features."""

    def __init__(self, keys: Mapping[str, TaskKey]):
        self.names = list(keys)
        self.thresholds = torch.tensor([key.threshold for key in keys.values()])
        # one product serves all keys that were learnt in the same space, which is usually all
        spaces: dict[bytes, list[int]] = {}
        for i, key in enumerate(keys.values()):
            space = key.mean.numpy().tobytes() + key.spread.numpy().tobytes()
            spaces.setdefault(space, []).append(i)
        own = list(keys.values())
        self.spaces = [
            (members, own[members[0]], torch.stack([own[i].vector for i in members]))
            for members in spaces.values()
        ]

    def similarities(self, features: Tensor) -> Tensor:
        """[n, tasks] of features [n, h]."""
        found = torch.zeros(len(features), len(self.names))
        for members, key, vectors in self.spaces:
            found[:, members] = directions(features, key.mean, key.spread) @ vectors.T
        return found

    def find(self, features: Tensor) -> list[Found]:
        """The nearest task of each text."""
        best = self.similarities(features).max(dim=1)
        known = best.values >= self.thresholds[best.indices]
        return [
            Found(self.names[i], value, is_known)
            for i, value, is_known in zip(
                best.indices.tolist(), best.values.tolist(), known.tolist(), strict=True
            )
        ]
