"""What stands before every request: size and time of a body, the token, other origins, metrics, headers."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qtuning.serve.metrics import Metrics

log = logging.getLogger("qtuning.serve")
HEADERS = (
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
OPEN_PATHS = ("/healthz", "/readyz")
READING = ("GET", "HEAD", "OPTIONS")
ANSWERING = "/v1/classify"
REFUSED = (401, 403, 408, 413, 429)
"""Worth a line in the log."""
ASK_TOKEN = {"WWW-Authenticate": "Bearer"}


class Refusal(HTTPException):
    """A request that goes no further. Raised inside the app, FastAPI answers it; before it, the guard does."""


class Guard:
    """ASGI middleware: refuses, counts, and adds headers."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        token: str | None = None,
        is_private: bool = False,
        hosts: tuple[str, ...] = (),
        most_bytes: int = 8 * 2**20,
        body_seconds: float = 15.0,
    ):
        """`token` is asked for changes, and for everything where `is_private`.

        `hosts` are the names it answers to: without a token, a page of a foreign name that leads here must get nothing.
        """
        self.app, self.metrics, self.token, self.is_private = app, metrics, token, is_private
        self.hosts = hosts
        self.most_bytes, self.body_seconds = most_bytes, body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or not."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, has_begun = time.perf_counter(), 500, False

        async def sent(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
                present = {name for name, _ in message["headers"]}
                extra = [pair for pair in HEADERS if pair[0] not in present]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        try:
            self._admit(scope)
            await self.app(scope, self._limited(receive), sent)
        except Refusal as refusal:
            if not has_begun:
                said = {"detail": refusal.detail}
                response = JSONResponse(said, refusal.status_code, refusal.headers)
                await response(scope, receive, sent)
        finally:
            if status in REFUSED:
                log.warning("refused %s %s: %d", scope["method"], scope["path"], status)
            route = scope.get("route")
            path = getattr(route, "path", "other")
            self.metrics.observe(scope["method"], path, status, time.perf_counter() - began)

    def _admit(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        path, method = scope["path"], scope["method"]
        changes = method not in READING and path != ANSWERING
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts and _name_of(host) not in self.hosts:
            raise Refusal(403, f"this server does not answer to the name {host!r}.")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if changes and origin and origin.partition("://")[2] != host:
            raise Refusal(403, f"a page of {origin} may not change this collection.")
        is_asked = self.token and (changes or self.is_private) and path not in OPEN_PATHS
        if is_asked and self.is_private and method in READING and _is_page(path):
            return  # the page itself holds nothing; it asks for the token
        if is_asked and not self._has_token(headers):
            said = "this needs the server's token: 'Authorization: Bearer TOKEN'."
            raise Refusal(401, said, ASK_TOKEN)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.most_bytes:
            raise Refusal(413, f"the body has {int(length):,} bytes; at most {self.most_bytes:,}.")

    def _has_token(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())

    def _limited(self, receive: Receive) -> Receive:
        """A body may be neither too long nor too slow, whatever its headers say."""
        size, deadline = 0, time.monotonic() + self.body_seconds
        is_whole = False

        async def limited() -> Message:
            nonlocal size, is_whole
            if is_whole:
                return await receive()  # the client going away: may take for ever
            try:
                left = max(0.0, deadline - time.monotonic())
                message: dict[str, Any] = dict(await asyncio.wait_for(receive(), left))
            except TimeoutError:
                raise Refusal(
                    408, f"the body did not come within {self.body_seconds:g} s."
                ) from None
            size += len(message.get("body", b""))
            if size > self.most_bytes:
                raise Refusal(413, f"the body has more than {self.most_bytes:,} bytes.")
            is_whole = not message.get("more_body", False)
            return message

        return limited


def _name_of(host: str) -> str:
    """Without the port."""
    name, _, port = host.rpartition(":")
    return name if name and port.isdigit() else host


def _is_page(path: str) -> bool:
    return path == "/" or path.startswith("/page/")
