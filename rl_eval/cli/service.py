"""``rl-eval service``: list the evaluation services of a cluster, or stop one."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any

import typer

from rl_eval.cli.exits import explained
from rl_eval.cli.printing import AsJson, print_either, print_report
from rl_eval.cli.shared import CommandLine, argument, option
from rl_eval.reports.page import Line, Page

Address = Annotated[
    str | None, option("HOST:PORT", "Ray cluster. [default: RAY_ADDRESS, or the cluster on this machine]")
]

app = CommandLine(
    name="service",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List evaluation services of a Ray cluster, or stop one.",
)


@app.command("list", epilog=explained(), short_help="Show the state of services.")
def list_(
    address: Address = None,
    namespace: Annotated[str | None, option("NAME", "Ray namespace. [default: all]")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the evaluation services of a cluster, with their state and clients."""
    from rl_eval.training.service.client import list_services, reach

    with closing(reach(address)):
        services = [
            status or {"name": name, "namespace": space, "state": "silent"}
            for (space, name), status in list_services(namespace).items()
        ]
    none = f"no evaluation service{'' if namespace is None else f' in namespace {namespace}'}"
    if as_json or not services:
        print_either(as_json, services, none)
    for status in () if as_json else services:
        print_report(_page(status))


@app.command("stop", epilog=explained(), short_help="Stop a service.")
def stop(
    name: Annotated[str, argument("NAME", "Name of the service.")],
    address: Address = None,
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Ray namespace.")] = "rl_eval",
    as_json: AsJson = False,
) -> None:
    """Stop an evaluation service and its runners; unfinished requests stay in the folder of the service."""
    from rl_eval.training.service.client import end_service, reach

    with closing(reach(address)):
        orderly = end_service(name, namespace)
    described = {"name": name, "namespace": namespace, "state": "ended" if orderly else "killed"}
    text = f"service {name} has stopped" if orderly else f"service {name} did not answer and was killed"
    print_either(as_json, described, text)


def _page(status: dict[str, Any]) -> Page:
    title, subtitle = f"service {status['name']}", f"namespace {status['namespace']}"
    if status["state"] == "silent":
        note = f"the service did not answer; stop it with `rl-eval service stop {status['name']}`"
        return Page(title, subtitle, "silent", [], [note])
    until = f"stops after {status['idle_timeout_s']:.0f} s without clients and work"
    lines = [
        Line("age", f"{status['age_s']:.0f} s", until if status["detached"] else f"{until}, or when its driver exits"),
        Line("runners", str(status["num_runners"]), "up"),
        Line("running", status["running"] or "nothing", ""),
        Line("queue", str(status["num_waiting"]), f"waiting, {status['num_finished']:,} finished"),
    ]
    clients = [Line("client", name, "") for name in status["clients"]]
    notes = [f"process {status['pid']} on {status['node']}, folder {status['output']}"]
    return Page(title, subtitle, status["state"], [lines, clients], notes)
