"""Learning on real weights; `make test-models` installs them and runs this."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qtuning import QTuner, export_peft, load_backbone, load_task
from qtuning.backbones import SOURCES
from qtuning.backbones.sources import packaged_file
from qtuning.config import make_settings
from qtuning.evaluation import majority_share, score_predictions
from qtuning.methods import make_method
from qtuning.snapshots import predict_log_probs
from qtuning.streams import list_cards
from tests.unit.test_export import in_peft, scores_of

pytestmark = pytest.mark.models
TASKS = ("spam", "sentiment-restaurants", "urgency")


@pytest.fixture(autouse=True)
def _needs_weights(request: pytest.FixtureRequest) -> None:
    model = request.node.callspec.params["model"] if hasattr(request.node, "callspec") else "minilm"
    if packaged_file(SOURCES[model]) is None:
        pytest.skip(f"the package of {model} is not installed: {SOURCES[model].install}")


@pytest.mark.parametrize("model", ["minilm", "bge-small", "smollm2-135m"])
def test_three_starter_tasks_above_the_majority_class(model: str) -> None:
    tuner = QTuner(model, prompt_length=5, shared_length=5, queue_size=2, validate_every=3)
    for name in TASKS:
        task = load_task(name)
        facts = tuner.learn(task, progress=False)
        majority = majority_share(task.split(16).test.labels)
        print(f"{model} {name}: test {facts['test_score']:.3f}, majority {majority:.3f}")
        assert facts["test_score"] > majority + 0.05


def test_the_starter_tasks_are_neither_trivial_nor_hopeless() -> None:
    """A linear probe on minilm, 16 per class, scores between 55 and 90 % on at least 8 tasks."""
    backbone = load_backbone("minilm", device="cpu")
    probe = make_method("linear-probe", backbone, *make_settings())
    scores = {}
    for name in [card.name for card in list_cards().values() if card.file]:
        task = load_task(name)
        split = task.split(16)
        snapshot = probe.learn(probe.start(0), task, split).snapshots[name]
        found = predict_log_probs(backbone, snapshot, split.test.texts).argmax(dim=-1).tolist()
        scores[name] = score_predictions("accuracy", split.test.labels, found)
    print(scores)
    assert sum(0.55 <= score <= 0.90 for score in scores.values()) >= 8


@pytest.mark.parametrize(
    ("model", "options"), [("smollm2-135m", {}), ("minilm", {"readout": "peft"})]
)
def test_an_exported_adapter_gives_the_same_scores_in_peft(
    model: str, options: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    small = {"prompt_length": 4, "shared_length": 4, "queue_size": 2, "epochs": 1, "shots": 4}
    tuner = QTuner(model, device="cpu", validation_limit=4, **options, **small)
    for name in TASKS[:2]:
        tuner.learn(load_task(name), progress=False)
    for name, card in tuner.tasks.items():
        folder = export_peft(tuner, name, tmp_path / name)
        about = json.loads((folder / "task.json").read_text())
        adapted = in_peft(tuner.backbone, folder, len(card.label_names))
        for text in load_task(name).texts[:8]:
            found = scores_of(adapted, about, tuner.backbone.tokenizer, text)
            expected = list(tuner.predict_proba(text, name).values())
            print(model, name, max(abs(a - b) for a, b in zip(found, expected, strict=True)))
            assert found == pytest.approx(expected, abs=1e-5)
