"""Evaluate reinforcement learning policies: results depend only on the policy, the environment and the plan.

Names are loaded on first use, so that importing rl_eval imports neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_eval.config.builder import EvalConfig
    from rl_eval.config.settings import EvalSettings
    from rl_eval.errors import EvalError, EvaluatorBusy
    from rl_eval.execution.evaluate import evaluate, evaluate_policy
    from rl_eval.execution.group import EvalRunnerGroup
    from rl_eval.execution.handle import EvalHandle, EvalProgress
    from rl_eval.protocols import EnvContext, NoiseSource, Policy
    from rl_eval.recording.replay import Replay, replay
    from rl_eval.recording.video_selection import VideoSettings
    from rl_eval.records.determinism import Determinism
    from rl_eval.records.episode import EpisodeRecord, Fault
    from rl_eval.results.comparison import Comparison, compare
    from rl_eval.results.loading import load
    from rl_eval.results.result import EvalPoint, EvalResult
    from rl_eval.runners import EvalRunner, SingleAgentEvalRunner, VectorEvalRunner
    from rl_eval.scheduling.plan import EpisodePlan
    from rl_eval.training.callbacks import NewBest, StopOnThreshold
    from rl_eval.training.evaluator import Evaluator
    from rl_eval.training.schedule import EvalSchedule

__version__ = "0.1.0"

_NAMES = {
    "config.builder": ("EvalConfig",),
    "config.settings": ("EvalSettings",),
    "errors": ("EvalError", "EvaluatorBusy"),
    "execution.evaluate": ("evaluate", "evaluate_policy"),
    "execution.group": ("EvalRunnerGroup",),
    "execution.handle": ("EvalHandle", "EvalProgress"),
    "protocols": ("EnvContext", "NoiseSource", "Policy"),
    "recording.replay": ("Replay", "replay"),
    "recording.video_selection": ("VideoSettings",),
    "records.determinism": ("Determinism",),
    "records.episode": ("EpisodeRecord", "Fault"),
    "results.comparison": ("Comparison", "compare"),
    "results.loading": ("load",),
    "results.result": ("EvalPoint", "EvalResult"),
    "runners": ("EvalRunner", "SingleAgentEvalRunner", "VectorEvalRunner"),
    "scheduling.plan": ("EpisodePlan",),
    "training.callbacks": ("NewBest", "StopOnThreshold"),
    "training.evaluator": ("Evaluator",),
    "training.schedule": ("EvalSchedule",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

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
    "evaluate_policy",
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
