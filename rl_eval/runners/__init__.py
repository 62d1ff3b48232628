"""Runners: leases to records, one environment slot at a time; and the class that a config selects.

``contract`` is what the control loop needs of any runner, ``base`` the abstract runner over slots. Imported by
backends and test tools; knows no schedule, store or log.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, cast

from rl_eval.config.references import import_attribute
from rl_eval.errors import ConfigError, nearest
from rl_eval.runners.base import EvalRunner
from rl_eval.runners.contract import Runner
from rl_eval.runners.observers import EpisodeObserver
from rl_eval.runners.single_agent import SingleAgentEvalRunner
from rl_eval.runners.vector import VectorEvalRunner

__all__ = [
    "KINDS",
    "EpisodeObserver",
    "EvalRunner",
    "Runner",
    "SingleAgentEvalRunner",
    "VectorEvalRunner",
    "runner_class",
]

KINDS: Final[Mapping[str, str]] = {
    "vector": "vector:VectorEvalRunner",
    "single_agent": "single_agent:SingleAgentEvalRunner",
    "multi_agent": "multi_agent.runner:MultiAgentEvalRunner",
    "subprocess": "subprocess_slots:SubprocessEvalRunner",
}
"""Runner kinds by name, as ``module:Class`` of this package: a process imports the kind that it uses.

All that differs between kinds is a fact of the class, as :class:`Runner` lists them.
"""
_MEMBERS: Final = (
    *("default_lanes", "max_lanes", "needs_processes", "several_agents", "columns"),
    *("run", "set_weights", "weights_version", "apply", "metrics", "stop"),
)


def runner_class(selected: str | type) -> type[Runner]:
    """Return the class that ``runners.runner`` names.

    Raises:
        ConfigError: The name is unknown, cannot be imported, or is no concrete :class:`Runner`.
    """
    if isinstance(selected, str):
        if selected in KINDS:
            selected = f"{__name__}.{KINDS[selected]}"
        if ":" not in selected:
            raise ConfigError(f'runners.runner is {selected!r}: {nearest(selected, KINDS)} (or "module:Class")')
        selected = cast("Any", import_attribute("runners.runner", selected))
    if not inspect.isclass(selected) or inspect.isabstract(selected):
        raise ConfigError(f"runners.runner is {selected!r}, which is not a concrete subclass of rl_eval.EvalRunner")
    if missing := [name for name in _MEMBERS if not hasattr(selected, name)]:
        raise ConfigError(
            f"runners.runner is {selected!r}, which lacks {', '.join(missing)} of a runner: derive it from "
            "rl_eval.EvalRunner, or write all members of rl_eval.runners.Runner"
        )
    return cast("type[Runner]", selected)
