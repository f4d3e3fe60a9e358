"""The same app in several replicas under Ray Serve, all on one collection folder.

Each replica batches its own requests, with the batcher that a single process uses; what one teaches the others notice
in the folder. So the folder must be reachable from every node.
"""

from __future__ import annotations

import signal
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from qtuning.ray_cluster import address_of, connected

if TYPE_CHECKING:
    from fastapi import FastAPI

    from qtuning.serve.app import Limits

GRACE_SECONDS = 60.0


def serve_on_ray(
    folder: Path,
    limits: Limits,
    how: dict[str, Any],
    listen: tuple[str, int],
    replicas: int,
    address: str | None = None,
    per_replica: dict[str, float] | None = None,
) -> None:
    """Until a signal comes.

    Args:
        folder: The collection.
        limits: What every replica takes.
        how: For `Service`.
        listen: Host and port.
        replicas: How many.
        address: Of a running cluster; this machine otherwise.
        per_replica: `num_cpus` and `num_gpus` of one.
    """
    place = folder.resolve()

    def build() -> FastAPI:
        from qtuning.serve.app import make_app
        from qtuning.serve.service import Service

        return make_app(Service(place, **how), limits)

    ended = Event()
    with connected(address):
        from ray import serve

        serve.start(http_options={"host": listen[0], "port": listen[1]})
        deployment = serve.deployment(
            serve.ingress(build)(),
            name="qtuning",
            num_replicas=replicas,
            ray_actor_options=per_replica or {"num_cpus": 1},
            max_ongoing_requests=limits.most_waiting,
            graceful_shutdown_timeout_s=GRACE_SECONDS,
        )
        serve.run(deployment.bind(), name="qtuning", route_prefix="/")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        while not ended.wait(1.0):
            pass
        if address_of(address) == "local":
            serve.shutdown()
        else:
            serve.delete("qtuning")  # what else the cluster serves is not ours to stop
