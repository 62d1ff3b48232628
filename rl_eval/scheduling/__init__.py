"""Scheduling of episodes: plan, schedule, verdicts on failures of runners, and the episodes that caused them.

All code here is pure: it turns events into commands, and uses no clock, randomness, process or disk.
"""
