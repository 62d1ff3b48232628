"""Execution of evaluations: the group, the control loop, the pool of runners, and the record store.

Only this folder uses both the schedule and the backends.
"""
