"""A server process: uvicorn, with an end at which nothing accepted is lost."""

from __future__ import annotations

import errno
import gc
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from qtuning.errors import ConfigError

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


def free_port(host: str, port: int = 0) -> int:
    """This port, or any with 0, if a server may listen there; else what is in the way."""
    try:
        kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:  # the second of what cannot be a name
        why = getattr(error, "strerror", error)
        raise ConfigError(
            f"there is no host {host!r} ({why}); use 127.0.0.1, or 0.0.0.0 for all networks of this machine."
        ) from None
    with socket.socket(kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(place)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(
                    f"port {port} of {host} is taken or not yours; choose another with --port."
                ) from None
            raise ConfigError(
                f"{host} is no address to listen on ({error.strerror}); choose another with --host."
            ) from None
        return int(probe.getsockname()[1])
