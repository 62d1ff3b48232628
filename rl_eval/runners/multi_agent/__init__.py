"""Environments of several agents: the runner, the APIs that it adapts, and who plays whom.

The runner steps a ``team``, which has one interface for every API. Runners import it; it imports no framework.
"""
