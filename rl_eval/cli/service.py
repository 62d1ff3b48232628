"""Command ``rl-eval service``: lists the evaluation services of a cluster, and ends one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_eval.cli.exits import Debug, explained, reported
from rl_eval.cli.printing import AsJson, print_json, print_line, print_report
from rl_eval.cli.shared import CommandLine, argument, option
from rl_eval.results.report.table import Line, Page

if TYPE_CHECKING:
    from rl_eval.training.service.messages import ServiceStatus

__all__ = ["app"]

Address = Annotated[
    str | None, option("HOST:PORT", "Ray cluster; by default RAY_ADDRESS, else the one that runs on this machine.")
]

app = CommandLine(
    name="service",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List evaluation services of a Ray cluster, or end one.",
)


@app.command("list", epilog=explained("service"), short_help="Show what services do.")
def list_(
    address: Address = None,
    namespace: Annotated[str | None, option("NAME", "Ray namespace; by default all.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the evaluation services of a cluster: what they do, and their clients."""
    with reported(debug), _connected(address):
        from rl_eval.training.service.directory import list_services

        services = list_services(namespace)
        if as_json:
            print_json([_plain(space, name, status) for (space, name), status in services.items()])
            return
        for (space, name), status in services.items():
            if status is None:
                silent = [f"no answer; `rl-eval service stop {name}`"]
                print_report(Page(f"service {name}", f"namespace {space}", "", [], silent))
            else:
                print_report(_page(status))
                print_line(f"folder {status.run_dir}")
            print_line()
        if not services:
            print_line(f"no evaluation service{'' if namespace is None else f' in namespace {namespace}'}")


@app.command("stop", epilog=explained("service"), short_help="End a service.")
def stop(
    name: Annotated[str, argument("NAME", "The service.")],
    address: Address = None,
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Ray namespace.")] = "rl_eval",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """End an evaluation service and its runners; what it has not done stays in its folder."""
    with reported(debug), _connected(address):
        from rl_eval.training.service.directory import end_service

        orderly = end_service(name, namespace)
        if as_json:
            print_json({"name": name, "namespace": namespace, "state": "ended" if orderly else "killed"})
        else:
            print_line(f"service {name} has ended" if orderly else f"service {name} did not answer, and was killed")


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    from rl_eval.training.service.directory import reach

    with closing(reach(address)):
        yield


def _plain(namespace: str, name: str, status: ServiceStatus | None) -> dict[str, Any]:
    """Return what is known of a service as JSON; of one that does not answer there are name, namespace and state."""
    if status is None:
        return {"name": name, "namespace": namespace, "state": "silent"}
    described = asdict(status)
    for client in described["clients"]:
        if math.isinf(client["silent_s"]):
            client["silent_s"] = None
    return described


def _page(status: ServiceStatus) -> Page:
    until = f"ends after {_duration(status.idle_timeout_s)} without clients and work"
    clients = [
        Line(
            "client",
            client.name,
            f"{client.num_waiting} waiting, {client.num_undelivered} undelivered, {_last_seen(client.silent_s)}",
        )
        for client in status.clients
    ]
    return Page(
        title=f"service {status.name}",
        subtitle=f"namespace {status.namespace}, process {status.pid} on {status.node}",
        state=status.state,
        sections=[
            [
                Line("age", _duration(status.age_s), until if status.detached else f"{until}, or with its driver"),
                Line("runners", str(status.num_runners), "up"),
                Line("running", status.running or "nothing", ""),
                Line("queue", str(status.num_waiting), f"waiting, {status.num_finished:,} finished"),
            ],
            clients,
        ],
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _last_seen(silent_s: float) -> str:
    return "not connected" if math.isinf(silent_s) else f"seen {_duration(silent_s)} ago"
