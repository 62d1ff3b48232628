"""Evaluate reinforcement learning policies: the result depends on policy, environment and plan alone.

Names are loaded on first use, so that importing rl_eval imports neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_eval.comparison import Comparison, compare
    from rl_eval.config import EvalConfig
    from rl_eval.determinism import Determinism
    from rl_eval.episode import EpisodeRecord, Fault
    from rl_eval.errors import EvalError, EvaluatorBusy
    from rl_eval.eval_schedule import EvalSchedule
    from rl_eval.evaluator import Evaluator
    from rl_eval.group import EvalRunnerGroup, evaluate
    from rl_eval.handle import EvalHandle, EvalProgress
    from rl_eval.hooks import NewBest, StopOnThreshold
    from rl_eval.loading import load
    from rl_eval.plan import EpisodePlan
    from rl_eval.point import EvalPoint
    from rl_eval.protocols import EnvContext, NoiseSource, Policy
    from rl_eval.replaying import Replay, replay
    from rl_eval.result import EvalResult
    from rl_eval.runners import EvalRunner, SingleAgentEvalRunner, VectorEvalRunner
    from rl_eval.settings import EvalSettings
    from rl_eval.video import VideoSettings

__version__ = "0.1.0"

_HOME = {
    "Comparison": "comparison",
    "Determinism": "determinism",
    "EnvContext": "protocols",
    "EpisodePlan": "plan",
    "EpisodeRecord": "episode",
    "EvalConfig": "config",
    "EvalError": "errors",
    "EvalHandle": "handle",
    "EvalPoint": "point",
    "EvalProgress": "handle",
    "EvalResult": "result",
    "EvalRunner": "runners",
    "EvalRunnerGroup": "group",
    "EvalSchedule": "eval_schedule",
    "EvalSettings": "settings",
    "Evaluator": "evaluator",
    "EvaluatorBusy": "errors",
    "Fault": "episode",
    "NewBest": "hooks",
    "NoiseSource": "protocols",
    "Policy": "protocols",
    "Replay": "replaying",
    "SingleAgentEvalRunner": "runners",
    "StopOnThreshold": "hooks",
    "VectorEvalRunner": "runners",
    "VideoSettings": "video",
    "compare": "comparison",
    "evaluate": "group",
    "load": "loading",
    "replay": "replaying",
}

__all__ = [
    "Comparison",
    "Determinism",
    "EnvContext",
    "EpisodePlan",
    "EpisodeRecord",
    "EvalConfig",
    "EvalError",
    "EvalHandle",
    "EvalPoint",
    "EvalProgress",
    "EvalResult",
    "EvalRunner",
    "EvalRunnerGroup",
    "EvalSchedule",
    "EvalSettings",
    "Evaluator",
    "EvaluatorBusy",
    "Fault",
    "NewBest",
    "NoiseSource",
    "Policy",
    "Replay",
    "SingleAgentEvalRunner",
    "StopOnThreshold",
    "VectorEvalRunner",
    "VideoSettings",
    "__version__",
    "compare",
    "evaluate",
    "load",
    "replay",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rl_eval' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rl_eval.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
