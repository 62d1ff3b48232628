"""Execution of evaluations: the group, the control loop that owns time, the pool of runners, and the record store.

The only folder that knows both the schedule and the backends. Imported by training, watching, videos and the command
line.
"""
