"""RLlib: its RLModules and connectors as policies, its configs translated, and rl_eval inside its Algorithms.

Names are imported on first use, so that filters and :class:`RolloutWorkers` do not import RLlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rl_eval.integrations import lazy_names

if TYPE_CHECKING:
    from rl_eval.integrations.rllib.agents import as_agents_env as as_agents_env
    from rl_eval.integrations.rllib.algorithm import as_policies as as_policies
    from rl_eval.integrations.rllib.algorithm import as_policy as as_policy
    from rl_eval.integrations.rllib.algorithm import as_weights as as_weights
    from rl_eval.integrations.rllib.algorithm import load_policy as load_policy
    from rl_eval.integrations.rllib.algorithm import policy_of_module as policy_of_module
    from rl_eval.integrations.rllib.algorithm import portable as portable
    from rl_eval.integrations.rllib.algorithm import versioned_weights as versioned_weights
    from rl_eval.integrations.rllib.config import eval_config_of as eval_config_of
    from rl_eval.integrations.rllib.evaluation import EvaluationFunction as EvaluationFunction
    from rl_eval.integrations.rllib.evaluation import EvaluationSession as EvaluationSession
    from rl_eval.integrations.rllib.evaluation import evaluation_function as evaluation_function
    from rl_eval.integrations.rllib.evaluation import session_of as session_of
    from rl_eval.integrations.rllib.policy import RLModulePolicy as RLModulePolicy

_NAMES: Final = {
    "agents": ("as_agents_env",),
    "algorithm": (
        *("as_policies", "as_policy", "as_weights", "load_policy", "policy_of_module", "portable"),
        "versioned_weights",
    ),
    "config": ("eval_config_of",),
    "evaluation": ("EvaluationFunction", "EvaluationSession", "evaluation_function", "session_of"),
    "policy": ("RLModulePolicy",),
}

__getattr__ = lazy_names(__name__, _NAMES)
