"""Environments of several agents: the runner, the APIs that it adapts, and the assignment of policies to agents.

The runner steps a ``team``, which has one interface for every API. Runners import it; it imports no framework.
"""
