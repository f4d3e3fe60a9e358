"""The server as a process: signals, kills, and a collection that is whole after all of them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
import httpx

from qtuning import QTuner
from qtuning.cli import main
from qtuning.errors import ConfigError
from qtuning.serve.run import free_port
from qtuning.serve.teaching import read_teachings
from tests.conftest import make_task
from tests.unit.test_serve import SMALL, TEXTS, as_json, files_of, save_model

START_SECONDS = 120.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    tuner = QTuner(str(save_model(folder / "model")), **{**SMALL, "epochs": 40})
    for name in ("tone", "mood"):
        tuner.learn(make_task(name, rows=12), progress=False)
    tuner.save_pretrained(folder / "collection")
    return folder / "collection"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "collection")
    return tmp_path / "collection"


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port, and its address."""
    command = [sys.executable, "-c", "from qtuning.cli import main; main()"]
    process = subprocess.Popen(
        [*command, "serve", str(folder), "--port", "0", *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        line = process.stdout.readline()  # type: ignore[union-attr]
        address = line.rsplit(" ", 1)[1].strip().rstrip("/")
        limit = time.monotonic() + START_SECONDS
        while True:
            try:
                httpx.get(f"{address}/readyz").raise_for_status()
                break
            except httpx.HTTPError:
                assert time.monotonic() < limit, "the server did not start"
                time.sleep(0.05)
        yield process, address
    finally:
        process.kill()
        process.wait()


def test_a_port_that_is_taken_is_refused_before_anything_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["qtuning", "serve", str(folder), "--port", str(port)])
        with pytest.raises(SystemExit) as ended:
            main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert f"port {port} of 127.0.0.1 is taken" in said.err


def test_where_to_listen() -> None:
    assert free_port("127.0.0.1") > 0
    port = free_port("localhost")
    assert free_port("127.0.0.1", port) == port
    with pytest.raises(ConfigError, match=r"there is no host 'no-such-host.invalid'"):
        free_port("no-such-host.invalid", 8000)
    with pytest.raises(ConfigError, match=r"there is no host 'a\.\.b' \("):
        free_port("a..b", 8000)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is no address to listen on.*another with --host"):  # fmt: skip
        free_port("192.0.2.1", 8000)  # for documentation: nobody has it


def test_a_signal_in_the_middle_loses_no_accepted_request(folder: Path) -> None:
    with served(folder) as (process, address):
        teaching = httpx.post(f"{address}/v1/tasks", json=as_json(make_task("new", rows=12))).json()

        def ask(i: int) -> int | None:
            body = {"inputs": [f"{TEXTS[i % 4]} {i}"] * 8, "task": "tone"}
            try:
                return httpx.post(f"{address}/v1/classify", json=body, timeout=60).status_code
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                return None  # nobody listened any more

        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(ask, i) for i in range(300)]
            while sum(each.done() for each in asked) < 40:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            found = [each.result() for each in asked]
        last = process.stdout.read().splitlines()[-1]  # type: ignore[union-attr]
        assert process.wait(60) in (0, -signal.SIGTERM)
    assert found.count(200) >= 40
    assert set(found) <= {200, None}
    said = f"stopped: {found.count(200)} of {found.count(200)} accepted requests were answered"
    assert last == said  # and every answer arrived
    tuner = QTuner.from_pretrained(folder)
    assert list(tuner.tasks)[:2] == ["tone", "mood"]
    left = (folder / "teaching" / f"{teaching['id']}.json").exists()
    assert left or "new" in tuner.tasks  # kept to be continued, or finished


def kill_while_teaching(made: Path, folder: Path, moments: list[float]) -> None:
    before = files_of(made / "tasks")
    expected = QTuner.from_pretrained(made).predict_proba(TEXTS, "tone")
    for i, moment in enumerate(moments):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
        with served(folder) as (process, address):
            httpx.post(f"{address}/v1/tasks", json=as_json(make_task(f"new{i}", rows=12)))
            time.sleep(moment)
            process.kill()
            process.wait()
        tuner = QTuner.from_pretrained(folder)
        after = files_of(folder / "tasks")
        assert {name: after[name] for name in before} == before
        assert tuner.predict_proba(TEXTS, "tone") == expected
        found = read_teachings(folder).values()
        left = [t.make_task().name for t in found if t.state == "stopped"]
        assert f"new{i}" in tuner.tasks or left == [f"new{i}"]  # accepted: never lost


def test_killed_while_teaching_the_collection_is_whole(made: Path, tmp_path: Path) -> None:
    kill_while_teaching(made, tmp_path / "collection", [0.0, 0.5])


@pytest.mark.slow
def test_killed_twenty_times_while_teaching(made: Path, tmp_path: Path) -> None:
    drawn = random.Random(0)
    kill_while_teaching(made, tmp_path / "collection", [drawn.uniform(0, 2.5) for _ in range(20)])


def test_a_host_for_others_needs_a_token(folder: Path) -> None:
    command = [sys.executable, "-c", "from qtuning.cli import main; main()", "serve", str(folder)]
    for options, says in (
        (["--host", "0.0.0.0"], "give a token"),
        (["--private"], "needs a token"),
        (["--ray", "--address", "127.0.0.1:6379", "--port", "0"], "on a cluster name one"),
    ):
        found = subprocess.run([*command, *options], capture_output=True, text=True)
        assert found.returncode == 2
        assert says in found.stderr
        assert "Traceback" not in found.stderr


@pytest.mark.ray
def test_two_replicas_give_the_same_answers_and_both_learn_what_one_is_taught(folder: Path) -> None:
    pytest.importorskip("ray")
    expected = QTuner.from_pretrained(folder).predict_proba(TEXTS, "tone")
    with served(folder, "--ray", "--replicas", "2") as (process, address):
        body = {"inputs": TEXTS, "task": "tone"}
        replicas = set()
        for _ in range(200):
            replicas.add(httpx.get(f"{address}/healthz").json()["process"])
            found = httpx.post(f"{address}/v1/classify", json=body).json()["answers"]
            for answer, own in zip(found, expected, strict=True):
                assert answer["probabilities"] == pytest.approx(own, abs=1e-5)
            if len(replicas) == 2:
                break
        assert len(replicas) == 2
        new = as_json(make_task("new", rows=12))
        teaching = httpx.post(f"{address}/v1/tasks", json=new, timeout=60).json()
        limit = time.monotonic() + 120
        while httpx.get(f"{address}/v1/teachings/{teaching['id']}").json()["state"] != "done":
            assert time.monotonic() < limit
            time.sleep(0.1)
        time.sleep(3)  # a look of the other replica
        answers, asked = set(), {"inputs": TEXTS, "task": "new"}
        for _ in range(40):
            reply = httpx.post(f"{address}/v1/classify", json=asked)
            assert reply.status_code == 200
            answers.add(reply.text)
        assert len(answers) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert list(QTuner.from_pretrained(folder).tasks) == ["tone", "mood", "new"]
