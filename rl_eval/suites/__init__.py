"""Suites: many evaluations from one file, in one folder, with the numbers of papers.

A suite has tasks, policies, training seeds and steps. A *cell* is one combination of them, and an ordinary evaluation
with a log of its own.
"""
