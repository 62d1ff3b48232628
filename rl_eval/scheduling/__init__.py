"""Scheduling of episodes: plan, schedule, verdicts on failures, attribution of losses.

Pure: events in, commands out; no clock, randomness, process or disk. Imported by everything from ``config/`` up.
"""
