"""A server process: uvicorn, with an end at which nothing accepted is lost."""

from __future__ import annotations

import gc
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

GRACE_SECONDS = 120
"""For answers and the epoch under way, after a signal."""


class Server(uvicorn.Server):
    """Tells the app at once that it ends, so that event streams close and `/readyz` says no."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM and SIGINT."""
        app: Any = self.config.app
        app.state.desk.is_closing = True
        super().handle_exit(sig, frame)


def serve(app: FastAPI, host: str, port: int) -> None:
    """Until a signal comes."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=GRACE_SECONDS,
        server_header=False,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            number, lambda *_: None
        )  # uvicorn raises it again at its end: not to die by it
    gc.collect()
    gc.freeze()  # what is loaded stays: looking through it now and then would halt all answers
    Server(config).run()


def is_free(host: str, port: int) -> bool:
    """Whether a server may listen there."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
