"""Nine architectures learn two tasks, predict, save, load: the same predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from qtuning import QTuner
from qtuning.backbones import weights_sha256
from tests.conftest import CONFIGS, SMALL, make_model, make_task, make_tokenizer

TEXTS = ["good soup late", "river", "bad bad stone early lost money"]


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_learn_predict_save_load(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(kind).save_pretrained(folder)
    make_tokenizer(kind).save_pretrained(folder)
    tuner = QTuner(str(folder), device="cpu", **SMALL)
    before = weights_sha256(tuner.backbone)
    tuner.learn(make_task("first", rows=10), progress=False)
    tuner.learn(
        make_task("second", ("report problem", "how to", "status"), rows=10), progress=False
    )
    assert weights_sha256(tuner.backbone) == before
    tuner.save_pretrained(tmp_path / "collection")
    loaded = QTuner.from_pretrained(tmp_path / "collection", device="cpu")
    tasks = ["first", "second", "second"]
    assert loaded.predict_proba(TEXTS, tasks) == tuner.predict_proba(TEXTS, tasks)
    assert loaded.predict(TEXTS, tasks) == tuner.predict(TEXTS, tasks)


def test_at_least_nine() -> None:
    assert len(CONFIGS) >= 9
