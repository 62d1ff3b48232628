"""Off-policy evaluation: the value of a policy, estimated from episodes that another policy ran.

``data`` reads logged episodes. ``target`` builds the target policy. ``estimators`` computes the sums of weighted
returns, and ``fitted_q`` fits a model of action values. ``estimate`` computes the estimates with intervals and
verdicts. See ``docs/trajectories.md``.
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
