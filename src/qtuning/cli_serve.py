"""The command that serves a collection. Registered in `cli.py`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

import typer

from qtuning.cli_runs import counted
from qtuning.errors import ConfigError
from qtuning.ray_cluster import address_of


def serve(
    collection: Annotated[Path, typer.Argument(help="Folder of the collection.")],
    host: Annotated[str, typer.Option(help="Where it listens; only this machine by default.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="QTUNING_TOKEN", help="Asked for changes.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Ask the token for everything.")] = (
        False
    ),
    model: Annotated[str | None, typer.Option(help="Where the model is, if it moved.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16; as saved by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; a GPU if there is one.")] = None,
    most_bytes: Annotated[int, typer.Option(help="Of a request's body.", min=1024)] = 8 * 2**20,
    most_waiting: Annotated[
        int, typer.Option(help="Texts that may wait before requests are refused (429).", min=1)
    ] = 1024,
    ray: Annotated[bool, typer.Option("--ray", help="Several replicas under Ray Serve.")] = False,
    replicas: Annotated[int, typer.Option(help="With --ray.", min=1)] = 2,
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster; this machine by default.")
    ] = None,
    gpus: Annotated[float, typer.Option(help="Of one replica, with --ray.", min=0)] = 0.0,
) -> None:
    """Serve a collection over HTTP, with a page to try and teach tasks at `/`.

    Examples:
        `qtuning serve support`

        `QTUNING_TOKEN=secret qtuning serve support --host 0.0.0.0 --port 8080`

        `qtuning serve support --ray --replicas 2`

        `curl localhost:8000/v1/classify -H 'content-type: application/json' -d '{"inputs": ["Where is my parcel?"]}'`
    """
    if private and not token:
        raise ConfigError("--private needs a token; give --token or set QTUNING_TOKEN.")
    if not token and not _is_loopback(host):
        raise ConfigError(
            f"host {host!r} can be reached from other machines: give a token for changes (--token, QTUNING_TOKEN)."
        )
    try:
        from qtuning.serve.app import Limits, make_app
        from qtuning.serve.run import free_port
        from qtuning.serve.run import serve as run_server
        from qtuning.serve.service import Service
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs {error.name}: pip install 'qtuning[serve]'.") from None
    hosts = () if token else ("localhost", "127.0.0.1", "[::1]", host)
    limits = Limits(token, private, hosts, most_bytes, most_waiting=most_waiting)
    how = {"model": model, "dtype": dtype, "device": device}
    if ray and address_of(address) != "local":
        if not port:
            raise ConfigError("--port 0 takes a free port of this machine; on a cluster name one.")
    else:  # a running cluster may listen there already, and elsewhere
        port = free_port(host, port)
    if ray:
        from qtuning.collection import read_collection
        from qtuning.serve.on_ray import serve_on_ray

        read_collection(collection)  # refuse here, not in a worker
        typer.echo(f"{collection}: {replicas} replicas, http://{host}:{port}/")
        per_replica = {"num_cpus": 1.0, "num_gpus": gpus}
        serve_on_ray(collection, limits, how, (host, port), replicas, address, per_replica)
        return
    service = Service(collection, **how)
    count, name = len(service.predictor.snapshots), service.tuner.backbone.name
    typer.echo(f"{collection}: {counted(count, 'task')} on {name}, http://{host}:{port}/")
    app = make_app(service, limits)
    run_server(app, host, port)
    batcher = app.state.desk.batcher
    typer.echo(f"stopped: {batcher.answered} of {batcher.accepted} accepted requests were answered")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
