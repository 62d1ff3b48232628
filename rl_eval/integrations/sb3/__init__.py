"""Stable-Baselines3: its models as policies, from an object or a zip file, and evaluation during its training.

Names are imported on first use, so a saved model can be examined without Stable-Baselines3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_eval.integrations import lazy_names

if TYPE_CHECKING:
    from rl_eval.integrations.sb3.callback import EvalCallback as EvalCallback
    from rl_eval.integrations.sb3.models import as_weights as as_weights
    from rl_eval.integrations.sb3.models import environment_settings as environment_settings
    from rl_eval.integrations.sb3.models import for_environment as for_environment
    from rl_eval.integrations.sb3.models import load_policy as load_policy
    from rl_eval.integrations.sb3.models import portable as portable
    from rl_eval.integrations.sb3.policy import SB3Policy as SB3Policy
    from rl_eval.integrations.sb3.policy import as_policy as as_policy

__getattr__ = lazy_names(
    __name__,
    {
        "callback": ("EvalCallback",),
        "models": ("as_weights", "environment_settings", "for_environment", "load_policy", "portable"),
        "policy": ("SB3Policy", "as_policy"),
    },
)
