"""Environments of several agents: the runner, the APIs that it adapts, and who plays whom.

``team`` is what the runner steps, whatever API is behind it. Imported by runners; knows no framework.
"""
