"""Command ``rl-eval service``: lists the evaluation services of a cluster, and ends one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated, Any

import typer

from rl_eval.cli.exits import explained
from rl_eval.cli.printing import AsJson, print_json, print_line, print_report
from rl_eval.cli.shared import CommandLine, argument, option
from rl_eval.reports.page import Line, Page

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


@app.command("list", epilog=explained("service"), short_help="Show the state of services.")
def list_(
    address: Address = None,
    namespace: Annotated[str | None, option("NAME", "Ray namespace; by default all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the evaluation services of a cluster: their state, and their clients."""
    with _connected(address):
        from rl_eval.training.service.directory import list_services

        services = [
            status or {"name": name, "namespace": space, "state": "silent"}
            for (space, name), status in list_services(namespace).items()
        ]
        if as_json:
            print_json(services)
            return
        for status in services:
            print_report(_page(status))
        if not services:
            print_line(f"no evaluation service{'' if namespace is None else f' in namespace {namespace}'}")


@app.command("stop", epilog=explained("service"), short_help="End a service.")
def stop(
    name: Annotated[str, argument("NAME", "The service.")],
    address: Address = None,
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Ray namespace.")] = "rl_eval",
    as_json: AsJson = False,
) -> None:
    """End an evaluation service and its runners; unfinished requests stay in its folder."""
    with _connected(address):
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


def _page(status: dict[str, Any]) -> Page:
    title, subtitle = f"service {status['name']}", f"namespace {status['namespace']}"
    if status["state"] == "silent":
        return Page(title, subtitle, "silent", [], [f"no answer; `rl-eval service stop {status['name']}` ends it"])
    until = f"ends after {status['idle_timeout_s']:.0f} s without clients and work"
    lines = [
        Line("age", f"{status['age_s']:.0f} s", until if status["detached"] else f"{until}, or with its driver"),
        Line("runners", str(status["num_runners"]), "up"),
        Line("running", status["running"] or "nothing", ""),
        Line("queue", str(status["num_waiting"]), f"waiting, {status['num_finished']:,} finished"),
    ]
    clients = [Line("client", name, "") for name in status["clients"]]
    notes = [f"process {status['pid']} on {status['node']}, folder {status['run_dir']}"]
    return Page(title, subtitle, status["state"], [lines, clients], notes)
