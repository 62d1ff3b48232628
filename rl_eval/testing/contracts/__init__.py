"""Contract suites: test classes to inherit, with the requirements for a runner, a policy or a simulator."""

from rl_eval.testing.contracts.policy import PolicyContract
from rl_eval.testing.contracts.runner import EvalRunnerContract
from rl_eval.testing.contracts.simulator import SimulatorContract

__all__ = ["EvalRunnerContract", "PolicyContract", "SimulatorContract"]
