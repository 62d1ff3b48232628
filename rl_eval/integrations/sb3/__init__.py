"""Stable-Baselines3: its models as policies, live or from a zip file, and evaluation beside its training.

Import this only where Stable-Baselines3 is installed; ``rl_eval.adapters`` does so when it meets one of its objects.
"""

from rl_eval.integrations.sb3.callback import EvalCallback
from rl_eval.integrations.sb3.live import as_weights, for_environment, portable
from rl_eval.integrations.sb3.loading import load_policy
from rl_eval.integrations.sb3.policy import SB3Policy, as_policy

__all__ = ["EvalCallback", "SB3Policy", "as_policy", "as_weights", "for_environment", "load_policy", "portable"]
