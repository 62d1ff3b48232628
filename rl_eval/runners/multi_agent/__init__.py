"""Environments of several agents: the runner, the APIs that it adapts, and the assignment of policies to agents.

The runner steps a :class:`~rl_eval.runners.multi_agent.team.TeamEnv`, whose interface is the same for every API.
"""
