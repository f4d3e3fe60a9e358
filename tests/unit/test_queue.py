from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtuning.errors import ConfigError
from qtuning.queue import PromptQueue
from qtuning.seeding import torch_generator


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 4),
    size=st.integers(1, 6),
    eviction=st.sampled_from(["pca", "fifo", "random"]),
    tasks=st.integers(1, 15),
    seed=st.integers(0, 10_000),
)
def test_the_queue_never_exceeds_its_capacity(
    length: int, size: int, eviction: str, tasks: int, seed: int
) -> None:
    queue = PromptQueue.empty(32, length, size, eviction)
    for task in range(tasks):
        with_room = queue.with_room(torch_generator(seed, task))
        assert len(with_room.rows) <= queue.capacity - length
        queue = with_room.append(
            torch.randn(length, 32, generator=torch_generator(seed, task, "p"))
        )
        assert len(queue.rows) == length * min(task + 1, size) <= queue.capacity == length * size
        assert torch.isfinite(queue.rows).all()


def test_eviction_none_grows_for_ever() -> None:
    queue = PromptQueue.empty(4, 2, 1, "none")
    for _ in range(5):
        queue = queue.with_room(torch_generator(0)).append(torch.randn(2, 4))
    assert len(queue.rows) == 10
    assert not queue.is_full


def test_changes_return_new_queues() -> None:
    queue = PromptQueue.empty(4, 2, 2)
    longer = queue.append(torch.ones(2, 4))
    assert len(queue.rows) == 0
    assert len(longer.rows) == 2


def test_newest_first_reverses_whole_prompts() -> None:
    for newest_first, expected in ((False, [1, 2, 3, 4]), (True, [3, 4, 1, 2])):
        queue = PromptQueue.empty(1, 2, 3, "fifo", newest_first=newest_first)
        queue = queue.append(torch.tensor([[1.0], [2.0]])).append(torch.tensor([[3.0], [4.0]]))
        assert queue.in_order().flatten().tolist() == expected


def test_a_full_queue_and_a_wrong_shape_are_refused() -> None:
    full = PromptQueue.empty(4, 2, 1).append(torch.ones(2, 4))
    with pytest.raises(ConfigError, match="already holds 2 of 2"):
        full.append(torch.ones(2, 4))
    with pytest.raises(ConfigError, match=r"shape \(2, 4\), got \(3, 4\)"):
        PromptQueue.empty(4, 2, 2).append(torch.ones(3, 4))
