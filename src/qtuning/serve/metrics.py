"""Counts for Prometheus. Every app has its own registry, so that two in one process do not mix."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "qtuning_requests",
            "Requests answered.",
            ("method", "path", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "qtuning_request_seconds",
            "From the first byte to the last.",
            ("path",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.rows = Histogram(
            "qtuning_batch_rows", "Texts that shared a pass.", buckets=ROWS, registry=self.registry
        )

    def gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        """A number that is read when asked for."""
        Gauge(f"qtuning_{name}", about, registry=self.registry).set_function(read)

    def observe(self, method: str, path: str, status: int, seconds: float) -> None:
        """A request was answered."""
        known = method if method in METHODS else "other"
        self.requests.labels(known, path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)
