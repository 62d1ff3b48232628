"""Contract suites: test classes to inherit, with the requirements for a runner or a policy."""

from rl_eval.testing.contracts.policy import PolicyContract
from rl_eval.testing.contracts.runner import EvalRunnerContract

__all__ = ["EvalRunnerContract", "PolicyContract"]
