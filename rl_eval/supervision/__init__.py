"""Supervision of runner processes: crash reports, deadlines, and termination of the processes that a runner left.

Runs on every node, mostly in separate processes, and does not import torch or Ray. Imported by everything that runs.
"""
