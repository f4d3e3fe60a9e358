from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from qtuning.errors import ConfigError
from qtuning.eviction import EVICTIONS, get_eviction, pca
from qtuning.seeding import torch_generator

GENERATOR = torch_generator("test")


@pytest.mark.parametrize(
    ("count", "length", "dim"), [(20, 5, 32), (12, 2, 64), (40, 10, 40), (6, 2, 4)]
)
def test_pca_equals_scikit_learn(count: int, length: int, dim: int) -> None:
    rows = torch.randn(count, dim, generator=torch_generator(count), dtype=torch.float64) + 0.7
    kept = pca(rows, length, GENERATOR).numpy()
    keep = count - length
    reference = PCA(n_components=keep, svd_solver="full").fit(rows.numpy())
    expected = reference.components_ * reference.singular_values_[:, None]
    centred = rows.numpy() - rows.numpy().mean(axis=0)
    for k in range(keep):  # our sign rule, applied to the reference's own left vectors
        left = centred @ reference.components_[k]
        expected[k] *= np.sign(left[np.abs(left).argmax()])
    np.testing.assert_allclose(kept, expected, atol=1e-6)


def test_pca_signs_do_not_depend_on_the_sign_of_the_decomposition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = torch.randn(8, 16, generator=torch_generator(1), dtype=torch.float64)
    expected = pca(rows, 2, GENERATOR)
    original = torch.linalg.svd

    def flipped(matrix: torch.Tensor, full_matrices: bool) -> tuple[torch.Tensor, ...]:
        left, singular, right = original(matrix, full_matrices=full_matrices)
        return -left, singular, -right

    monkeypatch.setattr(torch.linalg, "svd", flipped)
    torch.testing.assert_close(pca(rows, 2, GENERATOR), expected, rtol=0, atol=1e-12)


def test_pca_by_hand() -> None:
    rows = torch.tensor([[3.0, 0.0], [-1.0, 0.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    # mean 0; columns orthogonal with norms sqrt(12) and sqrt(2)
    kept = pca(rows, 2, GENERATOR)
    torch.testing.assert_close(
        kept.abs(),
        torch.tensor([[12**0.5, 0.0], [0.0, 2**0.5]], dtype=torch.float64),
        rtol=0,
        atol=1e-12,
    )
    assert kept[0, 0] > 0  # the largest left entry is that of row 0, on the positive side


def test_equally_large_entries_do_not_leave_the_sign_to_rounding() -> None:
    rows = torch.randn(2, 6, generator=torch_generator(3), dtype=torch.float64)
    noisy = rows + 1e-13 * torch.randn(2, 6, generator=torch_generator(4), dtype=torch.float64)
    torch.testing.assert_close(pca(rows, 1, GENERATOR), pca(noisy, 1, GENERATOR), rtol=0, atol=1e-9)


def test_pca_drops_the_mean_unless_told() -> None:
    rows = torch.randn(6, 12, generator=torch_generator(2)) + 5
    without, with_mean = (pca(rows, 2, GENERATOR, keep_mean=flag) for flag in (False, True))
    torch.testing.assert_close(with_mean - without, rows.mean(0).expand(4, -1), rtol=0, atol=1e-5)


def test_pca_refuses_too_few_components() -> None:
    with pytest.raises(ConfigError, match=r"at most 8.*Lower queue_size"):
        pca(torch.randn(20, 8), 5, GENERATOR)


def test_fifo_drops_the_oldest() -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    assert torch.equal(get_eviction("fifo")(rows, 2, GENERATOR), rows[2:])


def test_random_drops_one_whole_prompt_and_repeats_itself() -> None:
    rows = torch.arange(24.0).reshape(12, 2)
    drop = get_eviction("random")
    first = drop(rows, 3, torch_generator("a"))
    assert torch.equal(first, drop(rows, 3, torch_generator("a")))
    prompts = [tuple(p.flatten().tolist()) for p in rows.reshape(4, 3, 2)]
    kept = [tuple(p.flatten().tolist()) for p in first.reshape(3, 3, 2)]
    assert [p for p in prompts if p in kept] == kept
    dropped = {
        next(i for i, p in enumerate(prompts) if p not in
             [tuple(q.flatten().tolist()) for q in drop(rows, 3, torch_generator(s)).reshape(3, 3, 2)])
        for s in range(40)
    }  # fmt: skip
    assert dropped == {0, 1, 2, 3}


def test_none_keeps_everything_and_unknown_names_are_refused() -> None:
    rows = torch.randn(4, 3)
    assert torch.equal(EVICTIONS["none"](rows, 2, GENERATOR), rows)
    with pytest.raises(ConfigError, match="Did you mean 'pca'"):
        get_eviction("pcaa")
