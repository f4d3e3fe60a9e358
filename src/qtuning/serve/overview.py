"""What people want to see of a collection: its tasks, and what the queue remembers of them."""

from __future__ import annotations

from typing import Any

import torch

from qtuning.keys import directions
from qtuning.queue import shares_kept
from qtuning.tuner import QTuner


def tasks_of(tuner: QTuner) -> dict[str, Any]:
    """Name, labels and scores of every task."""
    tasks = []
    for name, snapshot in tuner.state.snapshots.items():
        card, facts = snapshot.card, snapshot.facts
        tasks.append(
            {
                "name": name,
                "labels": list(card.label_names),
                "is_pair": card.is_pair,
                "metric": card.metric,
                "version": tuner.version(name),
                "validation_score": facts.get("validation_score"),
                "test_score": facts.get("test_score"),
                "seconds": facts.get("seconds"),
                "has_key": snapshot.key is not None,
            }
        )
    return {"model": tuner.backbone.name, "method": tuner.method_name, "tasks": tasks}


def queue_of(tuner: QTuner) -> dict[str, Any]:
    """What is left of each task in the queue, the weights of its scale, and how like its texts are to others'."""
    state, settings = tuner.state, tuner.method_settings
    snapshots = dict(state.snapshots)
    queue = getattr(state, "queue", None)
    kept: list[float | None] = [None] * len(snapshots)
    if queue is not None and len(queue.rows):
        size, first = settings.prompt_length, settings.shared_length
        own = slice(first, first + size) if settings.newest_first else slice(-size, None)
        # rows of a snapshot are scaled, which turns them a little: one in the queue whole may show 0.99
        kept = [*shares_kept([each.rows[own] for each in snapshots.values()], queue.rows)]
    scales = [
        {"task": name, "values": [round(value, 4) for value in snapshot.facts["scale_u"]]}
        for name, snapshot in snapshots.items()
        if snapshot.facts.get("scale_u")
    ]
    keys = [snapshot.key for snapshot in snapshots.values()]
    similarity = [
        [round(_cosine(a, b), 4) if a is not None and b is not None else None for b in keys]
        for a in keys
    ]
    return {
        "tasks": list(snapshots),
        "queue_size": settings.queue_size if queue is not None else 0,
        "kept": kept,
        "scales": scales,
        "similarity": similarity,
    }


def _cosine(a: Any, b: Any) -> float:
    """Of two keys, each in the space of the first."""
    if torch.equal(a.mean, b.mean) and torch.equal(a.spread, b.spread):
        return float(a.vector @ b.vector)
    back = b.vector * b.spread + b.mean
    return float(directions(back[None], a.mean, a.spread)[0] @ a.vector)
