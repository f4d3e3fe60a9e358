"""Ray, where it is installed: this machine's own, or a cluster that is already running."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qtuning.errors import ConfigError

PASSED_ON = ("QTUNING_DATA", "QTUNING_CACHE", "HF_HOME", "HF_HUB_OFFLINE")
"""Variables that decide where models and texts are found: workers get the caller's."""


def address_of(given: str | None) -> str:
    """Of the cluster that is meant; `local` for a Ray of this machine's own."""
    return given or os.environ.get("RAY_ADDRESS") or "local"


@contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """The `ray` module, connected; what was started for it is stopped afterwards.

    Args:
        address: Of a running cluster; `RAY_ADDRESS` by default, and a Ray of this machine's own where there is neither.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            '--ray needs Ray: pip install "qtuning[ray]", or leave --ray out.'
        ) from None
    if ray.is_initialized():  # the caller's own connection, and the caller's to close
        yield ray
        return
    where = address_of(address)
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    options: dict[str, Any] = {"runtime_env": {"env_vars": passed}} if passed else {}
    if where == "local":
        options["include_dashboard"] = False
    try:
        ray.init(where, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"cannot reach Ray at {where!r}: {first} Check --address, or leave it out for this machine."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def cause_of(error: Exception) -> str:
    """The first line of what went wrong on a worker; Ray adds its own traceback and advice."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0]}"


def largest_node(ray: Any, resource: str) -> float:
    """How much of a resource (`CPU`, `GPU`) the best node of the cluster has."""
    return max(
        (node["Resources"].get(resource, 0.0) for node in ray.nodes() if node["Alive"]), default=0.0
    )
