"""RLlib: its RLModules with their connectors as policies, its configs as ours, our evaluation inside its Algorithms."""

from __future__ import annotations

from rl_eval.integrations.rllib.agents import as_agents_env
from rl_eval.integrations.rllib.algorithm import (
    as_policies,
    as_policy,
    as_weights,
    policy_of_module,
    portable,
    versioned_weights,
)
from rl_eval.integrations.rllib.checkpoint import load_policy
from rl_eval.integrations.rllib.config import eval_config_of
from rl_eval.integrations.rllib.evaluation import EvaluationFunction, evaluation_function
from rl_eval.integrations.rllib.policy import RLModulePolicy
from rl_eval.integrations.rllib.session import EvaluationSession, session_of

__all__ = [
    "EvaluationFunction",
    "EvaluationSession",
    "RLModulePolicy",
    "as_agents_env",
    "as_policies",
    "as_policy",
    "as_weights",
    "eval_config_of",
    "evaluation_function",
    "load_policy",
    "policy_of_module",
    "portable",
    "session_of",
    "versioned_weights",
]
