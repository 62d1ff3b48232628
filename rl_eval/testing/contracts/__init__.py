"""Contract suites: what a runner or a policy of your own must keep, as test classes to inherit."""

from rl_eval.testing.contracts.policy import PolicyContract
from rl_eval.testing.contracts.runner import EvalRunnerContract

__all__ = ["EvalRunnerContract", "PolicyContract"]
