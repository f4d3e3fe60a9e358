"""A server and a browser for the tests of the page."""

from __future__ import annotations

import os
import shutil
import threading
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


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where the server listens, such as http://127.0.0.1:4711; $QTUNING_ADDRESS names one that runs already."""
    if running := os.environ.get("QTUNING_ADDRESS"):
        yield running.rstrip("/")
        return
    import uvicorn

    from tests.browser.stand_in import build

    server = uvicorn.Server(uvicorn.Config(build(), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium: the machine's own, else the one that `playwright install chromium` brings."""
    from playwright.sync_api import sync_playwright

    own = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=own, args=FLAGS)
        yield running
        running.close()
