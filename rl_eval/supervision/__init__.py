"""Supervision of runner processes: crash reports, deadlines, and termination of the processes that a runner left.

This code runs on every node, mostly in separate processes. It does not import torch or Ray.
"""
