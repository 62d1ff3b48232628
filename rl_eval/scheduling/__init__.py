"""Scheduling of episodes: plan, schedule, verdicts on failures, attribution of losses.

All code here is pure: it turns events into commands, and uses no clock, randomness, process or disk.
"""
