"""Which runner class a config selects."""

from __future__ import annotations

import inspect
from typing import Final

from rl_eval.errors import ConfigError, nearest
from rl_eval.importing import import_attribute
from rl_eval.runners.base import EvalRunner
from rl_eval.runners.single_agent import SingleAgentEvalRunner
from rl_eval.runners.vector import VectorEvalRunner

__all__ = ["EvalRunner", "SingleAgentEvalRunner", "VectorEvalRunner", "runner_class"]

_BUILT_IN: Final[dict[str, type[EvalRunner]]] = {"vector": VectorEvalRunner, "single_agent": SingleAgentEvalRunner}


def runner_class(selected: str | type) -> type[EvalRunner]:
    """Return the class that ``runners.runner`` names.

    Raises:
        ConfigError: The name is unknown, cannot be imported, or is no concrete ``EvalRunner``.
    """
    if isinstance(selected, str):
        if selected in _BUILT_IN:
            return _BUILT_IN[selected]
        if ":" not in selected:
            raise ConfigError(f'runners.runner is {selected!r}: {nearest(selected, _BUILT_IN)} (or "module:Class")')
        selected = import_attribute("runners.runner", selected)
    if not (inspect.isclass(selected) and issubclass(selected, EvalRunner)) or inspect.isabstract(selected):
        raise ConfigError(f"runners.runner is {selected!r}, which is not a concrete subclass of rl_eval.EvalRunner")
    return selected
