"""Data folders, cards, streams and the three protocols, on made-up Parquet files."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from qtuning.data import fingerprint, load_task
from qtuning.errors import ConfigError, TaskError
from qtuning.evaluation import (
    average_so_far,
    learning_gain,
    score_parts,
    score_predictions,
    sign_flip_p,
)
from qtuning.protocols import make_split
from qtuning.streams import get_stream, list_cards, list_streams, list_tasks, read_stream

PAPER = [card for card in list_cards().values() if card.hub]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tiny stand-ins for four of the sets."""
    for name, train, test in (
        ("sst2", 60, 30),
        ("cb", 20, 9),
        ("banking77", 4, 3),
        ("multirc", 30, 20),
        ("yahoo", 5, 4),
    ):
        card = list_cards()[name]
        for part, count in (("train", train), ("test", test)):
            rows = []
            for label in range(len(card.labels)):
                for i in range(count):
                    text = {column: f"{column} {part} {label} {i}" for column in card.fields}
                    rows.append({**text, "label": label, "idx_question": i // 2})
            (tmp_path / name).mkdir(exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / name / f"{part}.parquet")
    return tmp_path


def test_the_catalog_holds_the_papers_sets_and_streams() -> None:
    assert len(PAPER) == 21
    orders = [list_streams()[f"order-{i:02d}"].tasks for i in range(1, 14)]
    assert [len(order) for order in orders] == [4, 4, 4, 5, 5, 5, 5, 15, 15, 15, 70, 70, 70]
    assert set(orders[10]) == set(orders[11]) == set(orders[12])
    assert len(set(orders[10])) == 70
    counts = Counter(list_tasks()[name][0].name for name in orders[10])
    assert (counts["banking77"], counts["dbpedia"], counts["yahoo"], counts["emotion"]) == (
        38,
        7,
        5,
        3,
    )
    assert orders[8][:4] == ("multirc", "boolq", "wic", "mnli")
    assert len(list_cards()["banking77"].labels) == 77


def test_pairs_are_disjoint_and_leave_the_last_banking_class_out() -> None:
    used = [label for i in range(38) for label in list_tasks()[f"banking77-{i}"][1]]
    everything = list(list_cards()["banking77"].labels)
    assert used == everything[:76]


def test_texts_are_rendered_as_the_protocol_says(folder: Path) -> None:
    assert load_task("sst2", folder).texts[0] == "sentence train 0 0"
    assert (
        load_task("cb", folder).texts[0]
        == "premise: premise train 0 0 hypothesis: hypothesis train 0 0"
    )
    pair = load_task("banking77-3", folder)
    assert len(pair.label_names) == 2
    assert pair.label_words[pair.label_names[0]] == pair.label_names[0].replace("_", " ")


def test_a_missing_set_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        TaskError, match=r"'imdb' is not in .*put it there.*'stanfordnlp/imdb' from the hub"
    ):
        load_task("imdb", folder)
    monkeypatch.setenv("QTUNING_DATA", str(folder))
    assert load_task("sst2").name == "sst2"


def test_progprompt_halves_the_evaluation_rows(folder: Path) -> None:
    split = make_split("progprompt", load_task("sst2", folder), 16, seed=1)
    assert split.sizes == {"train": 32, "validation": 30, "test": 30}
    assert not set(split.validation.texts) & set(split.test.texts)
    assert all("test" in text for text in split.validation.texts + split.test.texts)
    other = make_split("progprompt", load_task("sst2", folder), 16, seed=2)
    assert other.test == split.test  # the same test rows for every seed
    assert other.train != split.train
    whole = make_split("progprompt", load_task("cb", folder), 2, seed=0)
    assert whole.sizes["train"] == 60  # all of CB, whatever the shots
    assert "all 60 rows" in whole.notes[0]


def test_paper_holds_validation_out_of_train(folder: Path) -> None:
    split = make_split("paper", load_task("sst2", folder), 16, seed=0, validation_limit=500)
    assert split.sizes == {"train": 32, "validation": 44, "test": 60}
    assert all("train" in text for text in split.validation.texts)
    assert not set(split.train.texts) & set(split.validation.texts)


def test_tuning_looks_at_training_rows_alone(folder: Path) -> None:
    task = load_task("sst2", folder)
    split = make_split("tuning", task, 16, seed=0, validation_limit=10)
    parts = [split.train.texts, split.validation.texts, split.test.texts]
    assert all("train" in text for part in parts for text in part)
    assert len({text for part in parts for text in part}) == sum(map(len, parts))
    assert split.sizes["train"] == 32
    assert split.sizes["validation"] == 20
    other = make_split("tuning", task, 16, seed=1, validation_limit=10)
    assert other.train != split.train
    assert other.test == split.test  # the same test rows for every seed
    assert make_split("tuning", task, 0, seed=0).sizes["train"] > 32  # all that are not held out
    assert get_stream("tuning-long").protocol == "tuning"
    assert get_stream("order-09").protocol == "progprompt"
    assert get_stream("demo").protocol == "given"


def test_test_limit_and_fingerprint(folder: Path) -> None:
    task = load_task("sst2", folder)
    limited = make_split("paper", task, 16, 0, test_limit=5)
    assert Counter(limited.test.labels) == {0: 5, 1: 5}
    assert fingerprint(limited) == fingerprint(make_split("paper", task, 16, 0, test_limit=5))
    assert fingerprint(limited) != fingerprint(make_split("paper", task, 16, 1, test_limit=5))
    with pytest.raises(ConfigError, match="Did you mean 'paper'"):
        make_split("papr", task, 16, 0)


def test_multirc_scores_f1_and_exact_match_over_questions(folder: Path) -> None:
    task = load_task("multirc", folder)
    rows = make_split("paper", task, 4, 0).test
    assert task.metric == "f1+exact-match"
    assert rows.groups is not None
    right = score_parts(task.metric, rows.labels, rows.labels, rows.groups)
    assert right == {"f1": 1.0, "exact-match": 1.0}
    assert score_parts("exact-match", [1, 0, 1, 1], [1, 1, 1, 1], ["q", "q", "r", "r"]) == {
        "exact-match": 0.5
    }


@pytest.mark.parametrize("seed", range(5))
def test_metrics_equal_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gold, guess = rng.integers(0, 2, 40), rng.integers(0, 2, 40)
    found = score_parts("accuracy+f1+macro-f1+matthews", gold, guess)
    assert found == pytest.approx(
        {
            "accuracy": accuracy_score(gold, guess),
            "f1": f1_score(gold, guess),
            "macro-f1": f1_score(gold, guess, average="macro"),
            "matthews": matthews_corrcoef(gold, guess),
        }
    )
    mean = (found["accuracy"] + found["f1"]) / 2
    assert score_predictions("accuracy+f1", gold, guess) == pytest.approx(mean)


def test_more_of_the_matrix_by_hand() -> None:
    matrix = np.array([[0.5, 0.4], [0.9, 0.6], [0.7, 0.8]])
    assert average_so_far(matrix) == pytest.approx([0.9, 0.75])
    assert learning_gain(matrix, [0.8, 0.7]) == pytest.approx(0.1)


def test_sign_flip_test_by_hand() -> None:
    assert sign_flip_p([1.0, 1.0, 1.0]) == pytest.approx(2 / 8)
    assert sign_flip_p([1.0, -1.0]) == 1.0
    assert sign_flip_p([3.0, 1.0, -1.0]) == pytest.approx(6 / 8)  # 5, 3, 3 and their negatives
    assert sign_flip_p([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]) == 2 / 64  # all plus or all minus
    assert sign_flip_p([0.3, 0.2, 0.1]) == 2 / 8  # whose sum is not exact in binary
    assert np.isnan(sign_flip_p([]))


@pytest.mark.parametrize("seed", range(5))
def test_sign_flip_test_against_scipy(seed: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    differences = np.random.default_rng(seed).normal(0.4, 1.0, 4 + seed)
    reference = stats.permutation_test(
        (differences, np.zeros_like(differences)),
        lambda a, b: np.mean(a - b),
        permutation_type="samples",
        vectorized=False,
        n_resamples=np.inf,
    )
    assert sign_flip_p(list(differences)) == pytest.approx(reference.pvalue, abs=1e-12)


def test_a_users_own_stream(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nversion: 1\ndescription: my own\ntasks:\n  - spam\n  - my.csv\n"
    )
    assert get_stream(str(tmp_path / "mine.yaml")).tasks == ("spam", "my.csv")
    with pytest.raises(ConfigError, match=r"Unknown key .task.\. Did you mean 'tasks'"):
        read_stream({"name": "x", "task": []}, "x.yaml")
    with pytest.raises(ConfigError, match="'spam' stands in the stream twice"):
        read_stream(
            {"name": "x", "version": 1, "description": "", "tasks": ["spam", "spam"]}, "x.yaml"
        )


@pytest.mark.skipif(
    "QTUNING_DATA" not in os.environ, reason="QTUNING_DATA names no folder of the 21 sets"
)
def test_all_21_sets_load_with_their_counts() -> None:
    """Rows as the folder's own meta.json counts them, less rows without text."""
    import json

    for card in PAPER:
        meta = json.loads((Path(os.environ["QTUNING_DATA"]) / card.name / "meta.json").read_text())
        task = load_task(card.name)
        counts = Counter(task.splits)
        for part in ("train", "test"):
            kept = meta[part]["rows_kept"]
            assert kept - 60 <= counts[part] <= kept, (card.name, part, counts[part], kept)
        assert len(task.label_names) == meta["num_classes"]


@pytest.mark.slow
@pytest.mark.skipif(
    "QTUNING_DATA" not in os.environ, reason="QTUNING_DATA names no folder of the 21 sets"
)
@pytest.mark.parametrize("stream", [f"order-{i:02d}" for i in range(1, 14)])
def test_every_stream_runs_end_to_end_on_a_tiny_model(stream: str, tmp_path: Path) -> None:
    from qtuning.runs import RunConfig, run
    from tests.conftest import make_model, make_tokenizer

    make_model("bert").save_pretrained(tmp_path / "model")
    make_tokenizer("bert").save_pretrained(tmp_path / "model")
    settings = {
        "shots": 2,
        "epochs": 1,
        "prompt_length": 2,
        "shared_length": 2,
        "queue_size": 10,
        "validation_limit": 2,
    }
    config = RunConfig(
        stream, model=str(tmp_path / "model"), test_limit=4, inner_rows=4, settings=settings
    )
    (record,) = run(config, [0], tmp_path / "runs", device="cpu")
    assert record["backward_transfer"] == 0.0
    assert all(task["unchanged"] for task in record["tasks"].values())
    if len(record["tasks"]) == 70:
        live = [cost["live_tensor_bytes"] for cost in record["costs"]]
        assert live[69] <= 1.02 * live[11]
        print(f"{stream}: live tensor bytes at task 12 {live[11]}, at task 70 {live[69]}")
