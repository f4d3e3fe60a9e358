"""The server: same answers as the library, nothing lost, nothing changed by what it refuses."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread

import pytest
import torch

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from qtuning import QTuner, Task
from qtuning.backbones import load_backbone
from qtuning.backbones.prefixes import PromptMemory
from qtuning.errors import CollectionError, TaskError
from qtuning.predictor import Answer, Predictor
from qtuning.serve import app as app_module
from qtuning.serve import service as service_module
from qtuning.serve import teaching as teaching_module
from qtuning.serve.app import Limits, make_app
from qtuning.serve.batching import Batcher, Busy
from qtuning.serve.guards import Guard
from qtuning.serve.metrics import Metrics
from qtuning.serve.service import Service
from qtuning.serve.teaching import Owner, is_alive, sweep_owners
from qtuning.snapshots import predict_log_probs
from tests.conftest import make_model, make_task, make_tokenizer

SMALL = {"prompt_length": 2, "shared_length": 2, "queue_size": 2, "epochs": 3, "shots": 4}
TEXTS = ["good soup river", "bad stone late", "great bread", "cold lost red"]


def save_model(folder: Path, kind: str = "bert") -> Path:
    make_model(kind, 0).save_pretrained(folder)
    make_tokenizer(kind).save_pretrained(folder)
    return folder


def pairs(name: str) -> Task:
    rows = [((f"{a} good", f"{a} bad"), label) for a in "abcdef" for label in ("yes", "no")]
    return Task(name, [text for text, _ in rows], [label for _, label in rows])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection of three tasks, `same` on pairs. Copied, never changed."""
    folder = tmp_path_factory.mktemp("serve")
    tuner = QTuner(str(save_model(folder / "model")), **SMALL)
    for task in (make_task("tone", rows=12), make_task("mood", ("no", "yes"), rows=12, seed=1)):
        tuner.learn(task, progress=False)
    tuner.learn(pairs("same"), progress=False)
    tuner.save_pretrained(folder / "collection")
    return folder / "collection"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "collection")
    return tmp_path / "collection"


@pytest.fixture
def client(folder: Path):
    with TestClient(make_app(Service(folder))) as client:
        yield client


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def as_json(task: Task, **extra: object) -> dict:
    examples = [{"text": t, "label": y} for t, y in zip(task.texts, task.labels, strict=True)]
    return {"name": task.name, "examples": examples, **extra}


def wait_until(holds: Callable[[], object], within: float = 60.0) -> None:
    limit = time.monotonic() + within
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.02)


def ended(client: TestClient, teaching: dict, within: float = 60.0) -> dict:
    limit = time.monotonic() + within
    while time.monotonic() < limit:
        now = client.get(f"/v1/teachings/{teaching['id']}").json()
        if now["state"] in ("done", "failed", "stopped"):
            return now
        time.sleep(0.02)
    raise AssertionError(f"still {now}")


# ── answering ────────────────────────────────────────────────────────────────────────────────


def test_answers_are_those_of_the_library(client: TestClient, folder: Path) -> None:
    tuner = QTuner.from_pretrained(folder)
    inputs = [*TEXTS, ["a good", "a bad"]]
    tasks = ["tone", "mood", "mood", "tone", "same"]
    found = client.post("/v1/classify", json={"inputs": inputs, "task": tasks}).json()["answers"]
    rows = [*TEXTS, ("a good", "a bad")]
    for answer, expected, name in zip(found, tuner.predict_proba(rows, tasks), tasks, strict=True):
        assert answer["task"] == name
        assert answer["similarity"] is None
        assert answer["probabilities"] == pytest.approx(expected, abs=1e-6)
        assert answer["label"] == max(expected, key=expected.__getitem__)
        assert answer["score"] == max(answer["probabilities"].values())
    one = client.post("/v1/classify", json={"inputs": TEXTS, "task": "tone"}).json()["answers"]
    assert [a["label"] for a in one] == tuner.predict(TEXTS, "tone")


def test_without_a_task_it_is_found_or_unknown(client: TestClient, folder: Path) -> None:
    expected = QTuner.from_pretrained(folder).answer(TEXTS)
    found = client.post("/v1/classify", json={"inputs": TEXTS}).json()["answers"]
    for answer, own in zip(found, expected, strict=True):
        assert (answer["task"], answer["label"]) == (own.task, own.label)
        assert answer["similarity"] == pytest.approx(own.similarity, abs=1e-5)
    mixed = client.post("/v1/classify", json={"inputs": TEXTS[:2], "task": ["tone", None]}).json()
    assert mixed["answers"][0]["task"] == "tone"
    assert mixed["answers"][1]["similarity"] is not None


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5"])
def test_many_tasks_in_one_batch_answer_as_one_by_one(kind: str, tmp_path: Path) -> None:
    tuner = QTuner(
        str(save_model(tmp_path / kind, kind)), **{**SMALL, "epochs": 1, "queue_size": 3}
    )
    for i in range(5):
        labels = ("negative", "positive", "neutral")[: 2 + i % 2]
        tuner.learn(make_task(f"task{i}", labels, rows=8, seed=i), progress=False)
    drawn = random.Random(0)
    names = [f"task{drawn.randrange(5)}" for _ in range(64)]
    texts = [" ".join(drawn.choices(TEXTS, k=drawn.randint(1, 4))) for _ in names]
    together = tuner.predict_proba(texts, names)
    for text, name, found in zip(texts, names, together, strict=True):
        assert tuner.predict_proba(text, name) == pytest.approx(found, abs=1e-5)


def test_a_predictor_takes_over_what_was_prepared(folder: Path) -> None:
    tuner = QTuner.from_pretrained(folder)
    before = tuner.predictor
    before.prepare()
    left = {name: s for name, s in before.snapshots.items() if name != "mood"}
    after = Predictor(tuner.backbone, left, before)
    assert after._answerers["tone"] is before._answerers["tone"]
    assert "mood" not in after._answerers
    rows = ["good soup"] * 2
    assert [x.tolist() for x in after.log_probs(rows, ["tone", "tone"])] == [
        x.tolist() for x in before.log_probs(rows, ["tone", "tone"])
    ]
    with pytest.raises(TaskError, match="Unknown task 'mood'"):
        after.log_probs(rows, ["mood", "tone"])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "opt"])
def test_a_prompt_read_once_answers_as_one_read_with_every_text(kind: str, tmp_path: Path) -> None:
    settings = {**SMALL, "epochs": 1, "queue_size": 3}
    tuner = QTuner(str(save_model(tmp_path / kind, kind)), **settings)
    for i in range(3):  # prompts of different lengths, label words of one token and of two
        labels = ("negative", "positive") if i % 2 else ("report problem", "how to", "status")
        tuner.learn(make_task(f"task{i}", labels, rows=8, seed=i), progress=False)
    texts, names = TEXTS * 3, [f"task{i % 3}" for i in range(12)]
    found = tuner.predictor.log_probs(texts, names)
    memory = tuner.predictor._memory
    assert len(memory._kept) == 3
    snapshots = tuner.state.snapshots
    for text, name, own in zip(texts, names, found, strict=True):
        plain = predict_log_probs(tuner.backbone, snapshots[name], [text])[0]
        torch.testing.assert_close(own, plain, rtol=0, atol=1e-5)
    small = PromptMemory(tuner.backbone.read_prompt, most_bytes=1)  # no room: one at a time
    for name in snapshots:
        layout = tuner.predictor._answerers[name].layout
        assert small.recall(layout).equal(memory.recall(layout))
    assert len(small._kept) == 1


def test_a_twin_shares_weights_and_nothing_else(tmp_path: Path) -> None:
    backbone = load_backbone(str(save_model(tmp_path / "model", "gpt2")))
    twin = backbone.twin()
    pairs_of = zip(backbone.model.parameters(), twin.model.parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs_of)
    assert twin.model.config is not backbone.model.config
    assert twin.tokenizer is not backbone.tokenizer
    assert twin.fingerprint() == backbone.fingerprint()


# ── batching ─────────────────────────────────────────────────────────────────────────────────


def echo(texts, tasks) -> list[Answer]:
    return [Answer(task, None, text, {}) for text, task in zip(texts, tasks, strict=True)]


def test_what_waits_during_a_pass_goes_into_the_next_together() -> None:
    gate, sizes = Event(), []

    def answer(texts, tasks) -> list[Answer]:
        gate.wait(10)
        return echo(texts, tasks)

    batcher = Batcher(answer, sizes.append, rows_at_once=4)
    futures = [batcher.submit([f"text {i}"], ["tone"]) for i in range(7)]
    big = batcher.submit([f"big {i}" for i in range(9)], ["tone"] * 9)
    gate.set()
    assert [f.result(10)[0].label for f in futures] == [f"text {i}" for i in range(7)]
    assert [a.label for a in big.result(10)] == [f"big {i}" for i in range(9)]
    assert sum(sizes) == 16
    assert sizes[-1] == 9
    assert max(sizes[:-1]) == 4
    batcher.close()
    assert batcher.waiting == 0


def test_one_bad_request_does_not_spoil_the_others() -> None:
    gate = Event()

    def answer(texts, tasks) -> list[Answer]:
        gate.wait(10)
        if "bad" in texts:
            raise TaskError("no")
        return echo(texts, tasks)

    batcher = Batcher(answer)
    futures = [batcher.submit([text], ["tone"]) for text in ("first", "good", "bad", "fine")]
    gate.set()
    assert futures[1].result(10)[0].label == "good"
    assert futures[3].result(10)[0].label == "fine"
    with pytest.raises(TaskError):
        futures[2].result(10)
    batcher.close()


def test_too_much_waiting_is_refused_and_closing_answers_what_was_accepted() -> None:
    gate = Event()

    def answer(texts, tasks) -> list[Answer]:
        gate.wait(10)
        return echo(texts, tasks)

    batcher = Batcher(answer, most_waiting=3)
    futures = [batcher.submit([str(i)], [None]) for i in range(3)]
    with pytest.raises(Busy, match="3 texts are waiting"):
        batcher.submit(["4"], [None])
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(batcher.close)
        time.sleep(0.05)
        with pytest.raises(Busy, match="shutting down"):
            batcher.submit(["5"], [None])
        gate.set()
        closing.result(10)
    assert [f.result(0)[0].label for f in futures] == ["0", "1", "2"]


def test_a_client_that_gave_up_does_not_stop_the_others() -> None:
    gate = Event()

    def answer(texts, tasks) -> list[Answer]:
        gate.wait(10)
        return echo(texts, tasks)

    batcher = Batcher(answer, rows_at_once=1)
    first, gone, last = (batcher.submit([text], [None]) for text in ("first", "gone", "last"))
    while not first.running():
        time.sleep(0.01)
    assert gone.cancel()
    assert not first.cancel()  # already under way: answered
    gate.set()
    assert (first.result(10)[0].label, last.result(10)[0].label) == ("first", "last")
    assert batcher.submit(["more"], [None]).result(10)[0].label == "more"
    batcher.close()
    assert (batcher.waiting, batcher.accepted, batcher.answered) == (0, 4, 4)


def test_a_full_server_says_429_and_when_to_try_again(folder: Path) -> None:
    service = Service(folder)
    gate, plain = Event(), service.answer

    def slow(texts, tasks) -> list[Answer]:
        gate.wait(20)
        return plain(texts, tasks)

    service.answer = slow
    with (
        TestClient(make_app(service, Limits(most_waiting=2))) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        body = {"inputs": TEXTS[:1], "task": "tone"}
        first = [pool.submit(client.post, "/v1/classify", json=body) for _ in range(2)]
        while client.app.state.desk.batcher.waiting < 2:
            time.sleep(0.01)
        refused = client.post("/v1/classify", json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        gate.set()
        assert [each.result(20).status_code for each in first] == [200, 200]


# ── teaching ─────────────────────────────────────────────────────────────────────────────────


def test_a_taught_task_answers_and_the_old_ones_stay_as_they_were(
    client: TestClient, folder: Path
) -> None:
    before = files_of(folder / "tasks")
    old = client.post("/v1/classify", json={"inputs": TEXTS, "task": "tone"}).json()
    task = make_task("new", ("left", "right"), rows=12, seed=7)
    accepted = client.post("/v1/tasks", json=as_json(task))
    assert accepted.status_code == 202
    assert accepted.json()["state"] in ("waiting", "running")
    lines = client.get(f"/v1/teachings/{accepted.json()['id']}/events").text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert events[-1]["state"] == "done"
    assert events[-1]["result"]["task"] == "new"
    assert events[-1]["epoch"] == events[-1]["epochs"] == 3
    assert client.post("/v1/classify", json={"inputs": TEXTS, "task": "tone"}).json() == old
    after = files_of(folder / "tasks")
    assert {name: after[name] for name in before} == before
    found = client.post("/v1/classify", json={"inputs": TEXTS, "task": "new"}).json()["answers"]
    alone = QTuner.from_pretrained(folder)  # it is on disk
    assert [a["label"] for a in found] == alone.predict(TEXTS, "new")
    assert {f.suffix for f in (folder / "teaching").iterdir()} == {".status", ".owner", ".lock"}
    names = [t["name"] for t in client.get("/v1/tasks").json()["tasks"]]
    assert names == ["tone", "mood", "same", "new"]


def test_taught_by_the_server_or_by_the_library_it_is_the_same(
    client: TestClient, folder: Path, made: Path
) -> None:
    task = make_task("new", ("left", "right"), rows=12, seed=7)
    ended(client, client.post("/v1/tasks", json=as_json(task)).json())
    tuner = QTuner.from_pretrained(made)
    tuner.learn(task, progress=False)
    served = QTuner.from_pretrained(folder)
    ours, theirs = tuner.state.snapshots["new"], served.state.snapshots["new"]
    assert ours.rows.equal(theirs.rows)
    assert ours.head.weight.equal(theirs.head.weight)
    assert tuner.state.queue.rows.equal(served.state.queue.rows)


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_teaching_from_an_uploaded_file(client: TestClient, ending: str) -> None:
    task = make_task("upload", rows=10, seed=3)
    rows = list(zip(task.texts, task.labels, strict=True))
    mark = "\t" if ending == "tsv" else ","
    text = "\n".join([f"text{mark}label", *(f"{t}{mark}{y}" for t, y in rows)])
    if ending == "jsonl":
        text = "\n".join(json.dumps({"text": t, "label": y}) for t, y in rows)
    file = {"file": (f"given.{ending}", text.encode())}
    accepted = client.post("/v1/tasks", files=file, data={"name": "upload"})
    assert accepted.status_code == 202, accepted.text
    assert ended(client, accepted.json())["state"] == "done"
    again = client.post("/v1/tasks", files=file, data={"name": "upload"})
    assert again.status_code == 409
    assert "already in the collection" in again.json()["detail"]
    replaced = client.post("/v1/tasks", files=file, data={"name": "upload", "replace": "true"})
    assert ended(client, replaced.json())["state"] == "done"


def test_an_uploaded_table_that_would_lose_rows_is_refused(client: TestClient) -> None:
    file = {"file": ("given.csv", b'text,label\ngood,x\n"bad,y\n"so so",x\nfine,y\n')}
    refused = client.post("/v1/tasks", files=file, data={"name": "lossy"})
    assert refused.status_code == 422
    assert "line 3: a text that begins with a quotation mark" in refused.json()["detail"]


def slow_epochs(service: Service, seconds: float) -> None:
    """Every epoch takes so long at least."""
    from qtuning.serve.teaching import Teaching

    plain = Teaching.save_fit

    def save_fit(self, fit) -> None:
        time.sleep(seconds)
        plain(self, fit)

    service._slow = pytest.MonkeyPatch()
    service._slow.setattr(Teaching, "save_fit", save_fit)


def test_stopped_and_continued_ends_like_uninterrupted(folder: Path, made: Path) -> None:
    service = Service(folder)
    slow_epochs(service, 0.2)
    task = make_task("new", ("left", "right"), rows=12, seed=7)
    try:
        with TestClient(make_app(service)) as client:
            teaching = client.post("/v1/tasks", json=as_json(task)).json()
            while (now := client.get(f"/v1/teachings/{teaching['id']}").json()["epoch"]) < 2:
                time.sleep(0.01)
            client.post(f"/v1/teachings/{teaching['id']}/cancel")
            stopped = ended(client, teaching)
            assert stopped["state"] == "stopped"
            assert stopped["epoch"] <= now + 1
            assert "new" not in [t["name"] for t in client.get("/v1/tasks").json()["tasks"]]
        # another process: what was cut short is there
        with TestClient(make_app(Service(folder))) as client:
            (found,) = client.get("/v1/teachings").json()["teachings"]
            assert (found["id"], found["state"]) == (teaching["id"], "stopped")
            client.post(f"/v1/teachings/{teaching['id']}/continue")
            assert ended(client, teaching)["state"] == "done"
            refused = client.post(f"/v1/teachings/{teaching['id']}/continue")
            assert refused.status_code == 409
            assert "only a stopped one" in refused.json()["detail"]
    finally:
        service._slow.undo()
    tuner = QTuner.from_pretrained(made)
    tuner.learn(task, progress=False)
    assert tuner.state.snapshots["new"].rows.equal(
        QTuner.from_pretrained(folder).state.snapshots["new"].rows
    )


def test_removed_while_another_is_taught_it_stays_removed(folder: Path) -> None:
    service = Service(folder)
    slow_epochs(service, 0.1)
    try:
        with TestClient(make_app(service)) as client:
            teaching = client.post("/v1/tasks", json=as_json(make_task("new", rows=12))).json()
            gone = client.delete("/v1/tasks/mood")
            assert gone.json()["removed"] == "mood"
            assert "stays in them" in gone.json()["note"]
            assert ended(client, teaching)["state"] == "done"
            names = [t["name"] for t in client.get("/v1/tasks").json()["tasks"]]
            assert names == ["tone", "same", "new"]
            asked = client.post("/v1/classify", json={"inputs": TEXTS[:1], "task": "mood"})
            assert asked.status_code == 404
    finally:
        service._slow.undo()
    assert list(QTuner.from_pretrained(folder).tasks) == ["tone", "same", "new"]
    assert not (folder / "tasks" / "mood").exists()


def test_the_last_task_can_be_removed_and_a_new_one_taught(
    client: TestClient, folder: Path
) -> None:
    for name in ("tone", "mood", "same"):
        assert client.delete(f"/v1/tasks/{name}").status_code == 200
    assert client.get("/v1/tasks").json()["tasks"] == []
    assert client.get("/v1/queue").json()["tasks"] == []
    ask = {"inputs": TEXTS[:1], "task": "tone"}
    assert client.post("/v1/classify", json=ask).status_code == 404
    assert client.post("/v1/classify", json={"inputs": TEXTS[:1]}).status_code == 422
    Service(folder).close()  # it opens
    teaching = client.post("/v1/tasks", json=as_json(make_task("tone", rows=12))).json()
    assert ended(client, teaching)["state"] == "done"
    assert client.post("/v1/classify", json=ask).status_code == 200


def test_one_name_is_taught_once_however_many_ask(client: TestClient) -> None:
    body = as_json(make_task("new", rows=12))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: client.post("/v1/tasks", json=body), range(8)))
    assert sorted(reply.status_code for reply in found) == [202] + [409] * 7
    (accepted,) = [reply.json() for reply in found if reply.status_code == 202]
    assert ended(client, accepted)["state"] == "done"
    assert client.delete(f"/v1/teachings/{accepted['id']}").status_code == 200
    assert client.get("/v1/teachings").json()["teachings"] == []


def test_closing_does_not_wait_for_another_process_that_teaches(folder: Path) -> None:
    service = Service(folder)
    with (folder / "teaching" / "now.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        teaching = service.teach(make_task("new", rows=12))
        time.sleep(0.3)
        assert service.teaching(teaching.id).state == "waiting"
        began = time.monotonic()
        service.close()
        assert time.monotonic() - began < 5
    again = Service(folder)
    assert again.teaching(teaching.id).state == "stopped"
    again.go_on(teaching.id)
    while again.teaching(teaching.id).state != "done":
        time.sleep(0.02)
    again.close()


def test_what_the_library_learns_meanwhile_is_not_overwritten(folder: Path) -> None:
    service = Service(folder)
    slow_epochs(service, 0.3)
    try:
        teaching = service.teach(make_task("ours", rows=12))
        other = QTuner.from_pretrained(folder)
        other.learn(make_task("theirs", rows=12), progress=False)
        other.save_pretrained(folder)
        while service.teaching(teaching.id).state not in ("done", "failed"):
            time.sleep(0.02)
    finally:
        service._slow.undo()
        service.close()
    found = QTuner.from_pretrained(folder)
    assert list(found.tasks) == ["tone", "mood", "same", "theirs", "ours"]
    assert found.state.queue.rows.equal(other.state.queue.rows)


def test_a_new_key_or_other_labels_are_noticed(folder: Path) -> None:
    service = Service(folder)
    other = QTuner.from_pretrained(folder)
    old = other.state.snapshots["tone"]
    other.adopt(
        replace(other.state, snapshots={**other.state.snapshots, "tone": replace(old, key=None)})
    )
    other.save_pretrained(folder)
    service.refresh()
    assert service.predictor.snapshots["tone"].key is None
    assert service.predictor.snapshots["mood"].key is not None
    service.close()


def test_what_one_process_teaches_or_removes_another_serves(folder: Path) -> None:
    first, second = Service(folder), Service(folder)
    kept = second.predictor.snapshots["tone"]
    with TestClient(make_app(first)) as client:
        teaching = client.post("/v1/tasks", json=as_json(make_task("new", rows=12))).json()
        assert ended(client, teaching)["state"] == "done"
        client.delete("/v1/tasks/mood")
        second.refresh()
        assert list(second.predictor.snapshots) == ["tone", "same", "new"]
        assert second.predictor.snapshots["tone"] is kept  # nothing to prepare again
        asked = {"inputs": TEXTS, "task": "new"}
        served = client.post("/v1/classify", json=asked).json()["answers"]
    ours = second.answer(TEXTS, ["new"] * 4)
    assert [a.probabilities for a in ours] == [a["probabilities"] for a in served]


@pytest.mark.parametrize("other", [{"queue_size": 3}, {"method": "continual-finetune"}])
def test_another_collection_in_the_folder_changes_no_answer_and_is_not_taught(
    folder: Path,
    made: Path,
    other: dict,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(app_module, "LOOK_SECONDS", 0.02)
    service = Service(folder)
    with TestClient(make_app(service)) as client:
        asked = {"inputs": TEXTS, "task": "tone"}
        before = client.post("/v1/classify", json=asked).json()
        stranger = QTuner(str(made.parent / "model"), **{**SMALL, **other})
        stranger.learn(make_task("tone", rows=12, seed=5), progress=False)
        stranger.save_pretrained(folder, overwrite=True)
        saved = files_of(folder / "tasks")
        wait_until(lambda: "replaced by a collection with" in caplog.text)
        time.sleep(0.3)  # many looks more
        assert caplog.text.count("replaced by a collection with") == 1
        assert client.post("/v1/classify", json=asked).json() == before
        teaching = client.post("/v1/tasks", json=as_json(make_task("new", rows=12))).json()
        refused = ended(client, teaching)
        assert refused["state"] == "failed"
        assert "replaced by a collection with" in refused["message"]
        assert client.delete("/v1/tasks/tone").status_code == 422
        assert files_of(folder / "tasks") == saved


def test_a_change_that_could_not_be_followed_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app_module, "LOOK_SECONDS", 0.02)
    service = Service(folder)
    real, failures = Predictor.prepare, [MemoryError("no room")] * 3

    def prepare(self) -> None:
        if failures:
            raise failures.pop()
        real(self)

    with TestClient(make_app(service)):
        monkeypatch.setattr(Predictor, "prepare", prepare)
        other = QTuner.from_pretrained(folder)
        other.remove("mood")
        other.save_pretrained(folder)
        wait_until(lambda: "mood" not in service.predictor.snapshots)
    (said,) = [record for record in caplog.records if "no room" in record.getMessage()]
    assert said.levelno == logging.WARNING
    assert said.exc_info


def test_a_full_disk_does_not_end_teaching(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "RETRY_SECONDS", 0.02)
    service = Service(folder)
    real, is_full = teaching_module.write_atomic, Event()

    def write_atomic(path: Path, data: bytes) -> None:
        if is_full.is_set() and current_thread().name == "teacher":
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(teaching_module, "write_atomic", write_atomic)
    is_full.set()
    unlucky = service.teach(make_task("new", rows=12))
    wait_until(lambda: "cannot write that teaching 'new' is failed" in caplog.text)
    waiting = service.teach(make_task("other", rows=12))
    time.sleep(0.2)
    assert caplog.text.count("cannot write") == 1
    is_full.clear()
    wait_until(lambda: service.teaching(waiting.id).state == "done")
    assert service.teaching(unlucky.id).state == "failed"
    again = service.teach(make_task("new", rows=12))  # its name is free
    wait_until(lambda: service.teaching(again.id).state == "done")
    service.close()


def test_closing_does_not_wait_for_a_full_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "RETRY_SECONDS", 0.02)
    service = Service(folder)
    teaching = service.teach(make_task("new", rows=12))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(teaching_module, "write_atomic", full)
    wait_until(lambda: "cannot write" in caplog.text)
    service.close()
    assert service.teaching(teaching.id).state == "stopped"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_teacher_that_died_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(folder)

    def die(_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(service, "_learn", die)
        service.teach(make_task("new", rows=12))
        wait_until(lambda: not service._thread.is_alive())
    teaching = service.teach(make_task("other", rows=12))
    wait_until(lambda: service.teaching(teaching.id).state == "done")
    service.close()


def test_a_sweep_does_not_take_an_owner_that_is_just_beginning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "teaching").mkdir(exist_ok=True)
    real = fcntl.flock
    with ThreadPoolExecutor(1) as pool:

        def flock(what: object, how: int) -> None:
            if how == fcntl.LOCK_EX and str(getattr(what, "name", "")).endswith(".owner"):
                sweeps.append(pool.submit(sweep_owners, folder))
                time.sleep(0.2)
            real(what, how)

        sweeps: list = []
        monkeypatch.setattr(fcntl, "flock", flock)
        owner = Owner(folder)
        sweeps[0].result(10)
    assert is_alive(folder, owner.name)
    owner.leave()
    assert not is_alive(folder, owner.name)


def test_who_asks_for_a_dead_owner_at_the_same_time_is_not_taken_for_it(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    file = Path(owner._stream.name)
    owner.leave()
    file.touch()  # as a killed process leaves it
    with file.open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert not is_alive(tmp_path, owner.name)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────

JSON = {"content-type": "application/json"}
BAD = {
    "no-body": ("POST", "/v1/classify", b"", 422, "body"),
    "not-json": ("POST", "/v1/classify", b"{", 422, "JSON"),
    "no-inputs": ("POST", "/v1/classify", b'{"inputs": []}', 422, "inputs"),
    "blank": ("POST", "/v1/classify", b'{"inputs": [" "], "task": "tone"}', 422, "non-empty"),
    "three": ("POST", "/v1/classify", b'{"inputs": [["a", "b", "c"]]}', 422, "inputs"),
    "extra": ("POST", "/v1/classify", b'{"inputs": ["a"], "tsk": "tone"}', 422, "tsk"),
    "unknown": ("POST", "/v1/classify", b'{"inputs": ["a"], "task": "tune"}', 404, "'tone'"),
    "pair": ("POST", "/v1/classify", b'{"inputs": [["a", "b"]], "task": "tone"}', 422, "single"),
    "single": ("POST", "/v1/classify", b'{"inputs": ["a"], "task": "same"}', 422, "pairs"),
    "count": ("POST", "/v1/classify", b'{"inputs": ["a"], "task": ["tone", "tone"]}', 422, "each"),
    "echo": ("POST", "/v1/classify", b'{"inputs": [["I already paid", "x"]], "task": "tone"}', 422, "single"),
    "half-a-character": ("POST", "/v1/tasks", b'{"name": "n", "examples": [{"text": "\\ud800", "label": "x"}, '
                         b'{"text": "b", "label": "y"}]}', 422, ""),
    "method": ("PUT", "/v1/classify", b"", 405, "Method"),
    "path": ("GET", "/v1/nothing", b"", 404, "Not Found"),
    "teach-empty": ("POST", "/v1/tasks", b"{}", 422, "name"),
    "teach-taken": ("POST", "/v1/tasks", b'{"name": "tone", "examples": [{"text": "a", "label": "x"}, '
                    b'{"text": "b", "label": "y"}]}', 409, "already"),
    "teach-one-label": ("POST", "/v1/tasks", b'{"name": "n", "examples": [{"text": "a", "label": "x"}, '
                        b'{"text": "b", "label": "x"}]}', 422, "two classes"),
    "climbing": ("POST", "/v1/tasks", b'{"name": "../up", "examples": [{"text": "a", "label": "x"}, '
                 b'{"text": "b", "label": "y"}]}', 422, "../up"),
    "remove-unknown": ("DELETE", "/v1/tasks/tune", b"", 404, "Did you mean"),
    "remove-climbing": ("DELETE", "/v1/tasks/..%2F..%2Fcollection", b"", 404, ""),
    "page-climbing": ("GET", "/page/..%2f..%2fservice.py", b"", 404, ""),
    "teaching-unknown": ("GET", "/v1/teachings/t1", b"", 404, "Unknown teaching"),
    "events-unknown": ("GET", "/v1/teachings/t1/events", b"", 404, "Unknown teaching"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_said_in_a_line_and_changes_nothing(
    case: tuple, client: TestClient, folder: Path
) -> None:
    method, path, body, status, says = case
    before = files_of(folder)
    found = client.request(method, path, content=body, headers=JSON)
    assert found.status_code == status, found.text
    detail = found.json()["detail"]
    assert says in detail
    assert "\n" not in detail
    after = {name: data for name, data in files_of(folder).items() if not name.startswith(".")}
    assert after == {name: data for name, data in before.items() if not name.startswith(".")}


def test_a_token_is_asked_for_changes_and_for_everything_when_private(folder: Path) -> None:
    ask = {"json": {"inputs": TEXTS[:1], "task": "tone"}}
    right, wrong = ({"Authorization": f"Bearer {t}"} for t in ("secret", "secre"))
    with TestClient(make_app(Service(folder), Limits(token="secret"))) as client:
        assert client.post("/v1/classify", **ask).status_code == 200
        for headers in ({}, wrong, {"Authorization": "secret"}):
            refused = client.delete("/v1/tasks/tone", headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
        assert "tone" in QTuner.from_pretrained(folder).tasks
        assert client.delete("/v1/tasks/mood", headers=right).status_code == 200
    private = Limits(token="secret", is_private=True)
    with TestClient(make_app(Service(folder), private)) as client:
        assert client.post("/v1/classify", **ask).status_code == 401
        assert client.get("/v1/tasks", headers=wrong).status_code == 401
        assert client.get("/metrics").status_code == 401
        assert client.get("/healthz").status_code == 200
        assert client.post("/v1/classify", **ask, headers=right).status_code == 200


def test_another_origin_may_not_change_anything(client: TestClient, folder: Path) -> None:
    refused = client.delete("/v1/tasks/tone", headers={"Origin": "https://elsewhere.example"})
    assert refused.status_code == 403
    same = {"Origin": "http://testserver", "Host": "testserver"}
    assert client.delete("/v1/tasks/tone", headers=same).status_code == 200


def test_a_foreign_name_that_leads_here_gets_nothing(folder: Path) -> None:
    limits = Limits(hosts=("localhost", "127.0.0.1", "[::1]"))
    with TestClient(make_app(Service(folder), limits)) as client:
        for host in ("evil.example:8000", "evil.example", "", "127.0.0.1.evil.example"):
            headers = {"Host": host, "Origin": f"http://{host}"}
            assert client.delete("/v1/tasks/tone", headers=headers).status_code == 403
            assert client.get("/v1/tasks", headers=headers).status_code == 403
        for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
            assert client.get("/v1/tasks", headers={"Host": host}).status_code == 200
        odd = {"Host": "localhost", "Origin": "http://["}
        assert client.delete("/v1/tasks/tone", headers=odd).status_code == 403


def test_a_body_may_be_neither_too_long_nor_hide_its_length(folder: Path) -> None:
    with TestClient(make_app(Service(folder), Limits(most_bytes=2000))) as client:
        long = json.dumps({"inputs": ["a" * 3000]}).encode()
        assert client.post("/v1/classify", content=long, headers=JSON).status_code == 413
        chunks = (long[i : i + 500] for i in range(0, len(long), 500))
        assert client.post("/v1/classify", content=chunks, headers=JSON).status_code == 413


def test_a_slow_body_is_given_up() -> None:
    sent: list[dict] = []

    async def app(scope, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass
        raise AssertionError("the body never ends")

    async def receive() -> dict:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: dict) -> None:
        sent.append(message)

    guard = Guard(app, Metrics(), body_seconds=0.3)
    scope = {"type": "http", "method": "POST", "path": "/v1/classify", "headers": []}
    asyncio.run(guard(scope, receive, send))
    assert sent[0]["status"] == 408


def test_a_method_whose_tasks_move_is_not_served(tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "model"))
    tuner = QTuner(model, method="continual-finetune", **SMALL)
    tuner.learn(make_task("tone", rows=8), progress=False)
    tuner.save_pretrained(tmp_path / "collection")
    with pytest.raises(CollectionError, match=r"continual-finetune.*such as q-tuning"):
        Service(tmp_path / "collection")


# ── what people see ──────────────────────────────────────────────────────────────────────────


def test_what_the_queue_remembers(client: TestClient) -> None:
    found = client.get("/v1/queue").json()
    assert found["tasks"] == ["tone", "mood", "same"]
    assert found["queue_size"] == 2
    assert found["kept"][-1] == pytest.approx(1, abs=0.05)  # the newest is in it whole
    assert all(0 <= share <= 1.0001 for share in found["kept"])
    assert [len(each["values"]) for each in found["scales"]] == [2, 4, 4]
    for i, row in enumerate(found["similarity"]):
        assert row[i] == pytest.approx(1, abs=1e-4)


def test_health_metrics_and_description(client: TestClient) -> None:
    assert client.get("/healthz").json()["status"] == "ok"
    assert client.get("/readyz").status_code == 200
    client.post("/v1/classify", json={"inputs": TEXTS, "task": "tone"})
    text = client.get("/metrics").text
    assert "qtuning_tasks 3.0" in text
    assert "qtuning_batch_rows_sum 4.0" in text
    assert 'qtuning_requests_total{method="POST",path="/v1/classify",status="200"} 1.0' in text
    described = client.get("/openapi.json").json()
    assert set(described["paths"]) >= {"/v1/classify", "/v1/tasks", "/v1/tasks/{name}"}
    assert described["components"]["schemas"]["ClassifyBody"]["examples"]
    body = described["paths"]["/v1/tasks"]["post"]["requestBody"]["content"]
    assert set(body) == {"application/json", "multipart/form-data"}
    assert (
        client.get("/v1/tasks").headers["content-security-policy"].startswith("default-src 'self'")
    )


# ── noise ────────────────────────────────────────────────────────────────────────────────────


def noise(drawn: random.Random) -> tuple[str, str, bytes, str]:
    """A request that is nearly right, or not at all."""
    good = {
        "inputs": ["good soup", ["a", "b"]],
        "task": drawn.choice(["tone", None, ["tone", "same"]]),
    }
    odd = [None, 0, -1, 1e308, True, "", " ", "\x00", "\ud800".encode("utf-8", "replace").decode(),
           [], {}, [[]], "x" * 5000, ["a", 1], {"a": "b"}, "../..", "tone", float("1e999")]  # fmt: skip
    body = dict(good)
    for _ in range(drawn.randint(0, 2)):
        body[drawn.choice(["inputs", "task", "name", "examples", "replace", "x"])] = drawn.choice(
            odd
        )
    data = json.dumps(body).encode()
    if drawn.random() < 0.3:
        cut = drawn.randrange(len(data))
        data = data[:cut] + bytes(drawn.randrange(256) for _ in range(drawn.randint(0, 8)))
    path = drawn.choice(["/v1/classify", "/v1/classify", "/v1/tasks", "/v1/teachings/x/cancel"])
    form = ["multipart/form-data", "multipart/form-data; boundary=x"]
    kind = drawn.choice([*["application/json"] * 4, "text/csv", *form, ""])
    return drawn.choice(["POST"] * 6 + ["DELETE", "PUT"]), path, data, kind


def bombard(client: TestClient, count: int, folder: Path) -> None:
    before = files_of(folder / "tasks")
    drawn = random.Random(0)
    for i in range(count):
        method, path, data, kind = noise(drawn)
        found = client.request(method, path, content=data, headers={"content-type": kind})
        assert found.status_code < 500, (i, method, path, data, found.text)
    assert files_of(folder / "tasks") == before


def test_malformed_bodies_never_break_it(folder: Path) -> None:
    with TestClient(make_app(Service(folder)), raise_server_exceptions=False) as client:
        bombard(client, 500, folder)


@pytest.mark.slow
def test_ten_thousand_malformed_bodies(folder: Path) -> None:
    with TestClient(make_app(Service(folder)), raise_server_exceptions=False) as client:
        bombard(client, 10_000, folder)
