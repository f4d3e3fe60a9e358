"""Every registered method, in every family it declares: two tasks, its claims checked."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qtuning import QTuner, methods
from qtuning.backbones import weights_sha256
from qtuning.config import make_settings
from qtuning.errors import ConfigError
from qtuning.evaluation import backward_transfer, forgetting
from qtuning.methods import list_methods, make_method, register
from qtuning.stream_loop import run_stream
from qtuning.tuning import BUDGET, candidates
from tests.conftest import SMALL, make_backbone, make_task

METHODS = list_methods()


@pytest.mark.parametrize("name", list(METHODS))
def test_two_tasks(name: str, family_backbone, tmp_path: Path) -> None:
    info = METHODS[name]
    if family_backbone.family not in info.families:
        with pytest.raises(
            ConfigError, match=f"method '{name}' serves {', '.join(info.families)} models"
        ):
            QTuner(family_backbone, method=name, **SMALL)
        return
    before = weights_sha256(family_backbone)
    tuner = QTuner(family_backbone, method=name, **SMALL)
    first, second = (
        make_task("first", rows=10),
        make_task("second", ("up", "down", "left"), rows=10),
    )
    tuner.learn(first, progress=False)
    texts = list(first.texts[:6])
    then = torch.stack(tuner.predictor.log_probs(texts, ["first"] * 6))
    tuner.learn(second, progress=False)
    now = torch.stack(tuner.predictor.log_probs(texts, ["first"] * 6))
    if not info.forgets:
        assert torch.equal(then, now)
    assert weights_sha256(family_backbone) == before
    tuner.save_pretrained(tmp_path / "c")
    loaded = QTuner.from_pretrained(tmp_path / "c", model=family_backbone)
    assert loaded.predict_proba(texts, "second") == tuner.predict_proba(texts, "second")
    third = make_task("third", rows=10)
    assert loaded.learn(third, progress=False)["task"] == "third"


@pytest.mark.parametrize("mode", ["snapshot", "shared", "current"])
def test_the_stream_loop_measures_every_cell(family_backbone, mode: str) -> None:
    method, train = make_settings(**SMALL)
    learner = make_method("q-tuning", family_backbone, method, train)
    tasks = [make_task(f"task{i}", rows=10, seed=i) for i in range(5)]
    result = run_stream(learner, family_backbone, tasks, train, evaluate_with=mode)
    measured = ~np.isnan(result.matrix)
    assert result.matrix.shape == (6, 5)
    assert all(measured[i, :i].all() for i in range(6))
    if family_backbone.needs_head:
        assert measured.sum() == 15
    else:  # label words can be scored before a task is learnt
        assert measured[0].all()
        assert all(measured[i, i] for i in range(5))
    if mode == "snapshot":
        assert all(result.unchanged.values())
        assert backward_transfer(result.matrix) == 0.0
    else:
        assert not all(result.unchanged.values())  # prefix and queue did change


@pytest.mark.parametrize("name", ["q-tuning", "prompt-tuning"])
def test_without_inner_cells_a_task_is_asked_when_learnt_and_at_the_end(
    family_backbone, name: str
) -> None:
    method, train = make_settings(**SMALL)
    tasks = [make_task(f"task{i}", rows=10, seed=i) for i in range(4)]
    found = [
        run_stream(
            make_method(name, family_backbone, method, train),
            family_backbone,
            tasks,
            train,
            inner_rows=rows,
        )
        for rows in (0, None)
    ]
    few, every = found
    measured = ~np.isnan(few.matrix)
    assert measured.sum() == 4 + 3
    assert measured[4].all()
    assert all(measured[i + 1, i] for i in range(4))
    assert (few.matrix[measured] == every.matrix[measured]).all()
    assert forgetting(few.sampled) == -backward_transfer(every.matrix)
    assert few.unchanged == every.unchanged


def test_a_fine_tuned_model_forgets_by_the_same_measure() -> None:
    """The whole tiny model, trained on one task after another with one head: BWT below 0, unlike ours."""
    backbone = make_backbone("bert")
    labels = ("negative", "positive")
    tasks = [
        make_task("first", labels, rows=12),
        make_task("second", labels[::-1], rows=12, seed=5),
    ]
    model = backbone.model.requires_grad_(True)
    head = torch.nn.Linear(32, 2)
    optimiser = torch.optim.Adam([*model.parameters(), *head.parameters()], 3e-3)
    matrix = np.full((3, 2), np.nan)

    def logits(texts):
        coded = backbone.tokenizer(list(texts), padding=True, return_tensors="pt")
        return head(model(**coded).last_hidden_state[:, 0])

    for i, task in enumerate(tasks, start=1):
        gold = torch.tensor([labels.index(label) for label in task.labels])
        for _ in range(40):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(logits(task.texts), gold).backward()
            optimiser.step()
        for j, earlier in enumerate(tasks[:i]):
            truth = torch.tensor([labels.index(label) for label in earlier.labels])
            with torch.no_grad():
                matrix[i, j] = float((logits(earlier.texts).argmax(-1) == truth).float().mean())
    assert matrix[1, 0] > 0.9
    assert backward_transfer(matrix) < -0.2


def test_registry_refuses_doubles_and_suggests() -> None:
    with pytest.raises(ConfigError, match="registered already"):
        register(METHODS["q-tuning"])
    with pytest.raises(ConfigError, match="Did you mean 'q-tuning'"):
        QTuner("minilm", method="qtuning")


def test_the_walk_of_contributing(bert, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file that CONTRIBUTING shows, put among the methods, and its name in the list: nothing else."""
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "averaging.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr("qtuning.methods._REGISTRY", dict(METHODS))
    monkeypatch.setattr("qtuning.methods.__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.setattr("qtuning.methods._FILES", (*methods._FILES, "averaging"))
    monkeypatch.delitem(sys.modules, "qtuning.methods.averaging", raising=False)
    assert "mean-start" in list_methods()
    method = make_method("mean-start", bert, *make_settings(**SMALL))
    task = make_task("first", rows=10)
    state = method.learn(method.start(0), task, task.split(4))
    second = make_task("second", rows=10)
    lane = method.lane(state, second, second.split(4))
    assert torch.equal(lane.trained["prompt"], state.queue.rows)  # the mean of one prompt
    tuner = QTuner(bert, method="mean-start", **SMALL)
    tuner.learn(task, progress=False)
    tuner.learn(second, progress=False)
    assert tuner.predict(["good soup"], "first")
    assert len(candidates("mean-start", "encoder", {})) == BUDGET


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_is_described_and_has_the_same_number_of_tries(name: str) -> None:
    info = METHODS[name]
    tries = candidates(name, info.families[0], {})
    assert len(tries) == (BUDGET if info.grid else 1)
    assert len({str(each) for each in tries}) == len(tries)
    assert info.grid or name in ("zero-shot", "linear-probe")  # which have nothing to tune
    module = sys.modules[info.make.__module__]
    assert "Relations:" in module.__doc__
    assert info.paper
