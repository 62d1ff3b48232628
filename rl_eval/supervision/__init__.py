"""Supervision of runner processes: who died doing what, deadlines, and ending what is left of a runner.

Runs on every node, mostly in processes of its own, and imports neither torch nor Ray. Imported by everything that runs.
"""
