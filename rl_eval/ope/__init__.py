"""Off-policy evaluation: the value of a policy, estimated from episodes that another policy ran.

``data`` is what was logged, ``target`` the policy in question, ``estimators`` the sums of weighted returns,
``fitted_q`` a model of them, ``estimate`` the numbers with intervals and verdicts. Imported by the command line. See
``docs/off_policy.md``.
"""

from rl_eval.ope.data import LoggedEpisodes, load_episodes
from rl_eval.ope.estimate import Estimate, OffPolicyEstimates, estimate
from rl_eval.ope.estimators import ActionValues
from rl_eval.ope.target import target_policy

__all__ = [
    "ActionValues",
    "Estimate",
    "LoggedEpisodes",
    "OffPolicyEstimates",
    "estimate",
    "load_episodes",
    "target_policy",
]
