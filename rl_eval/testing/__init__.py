"""Test tools for evaluators: environments with a known mean return or known faults, and contract suites to inherit.

A fault has a place: episode, attempt and step. So the same episode fails at the same step on any runner, and a retry
can succeed. Every factory works as ``environment.env`` in a config, for example ``env: "rl_eval.testing:faulty"``.
"""

from rl_eval.testing.contracts import EvalRunnerContract, PolicyContract, SimulatorContract
from rl_eval.testing.environments import (
    DictObservation,
    ImpureEnv,
    TwoLengthEnv,
    impure,
    make_dict_policy,
    make_gru,
    two_length,
)
from rl_eval.testing.faulty_env import FaultyEnv, InjectedFault, dict_observation, faulty

__all__ = [
    "DictObservation",
    "EvalRunnerContract",
    "FaultyEnv",
    "ImpureEnv",
    "InjectedFault",
    "PolicyContract",
    "SimulatorContract",
    "TwoLengthEnv",
    "dict_observation",
    "faulty",
    "impure",
    "make_dict_policy",
    "make_gru",
    "two_length",
]
