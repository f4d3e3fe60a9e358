"""A server and a browser for the tests of the page."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


TASKS = ("intent-delivery", "tone", "urgency", "entailment", "intent-bank")
LIGHT = {"epochs": 15, "shots": 8, "prompt_length": 5, "shared_length": 5, "queue_size": 4}


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the server listens, such as http://127.0.0.1:4711; $QTUNING_ADDRESS names one that runs already."""
    if running := os.environ.get("QTUNING_ADDRESS"):
        yield running.rstrip("/")
        return
    from qtuning import QTuner, load_task

    folder = tmp_path_factory.mktemp("served") / "collection"
    tuner = QTuner("minilm", **LIGHT)
    for name in TASKS:
        tuner.learn(load_task(name), progress=False)
    tuner.save_pretrained(folder)
    command = [sys.executable, "-c", "from qtuning.cli import main; main()"]
    process = subprocess.Popen(
        [*command, "serve", str(folder), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    where = process.stdout.readline().rsplit(" ", 1)[1].strip().rstrip("/")  # type: ignore[union-attr]
    while not _is_ready(where):
        time.sleep(0.1)
    yield where
    process.terminate()
    process.wait(60)


def _is_ready(address: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{address}/readyz").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium: the machine's own, else the one that `playwright install chromium` brings."""
    from playwright.sync_api import sync_playwright

    own = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=own, args=FLAGS)
        yield running
        running.close()
