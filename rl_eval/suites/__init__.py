"""Suites: many evaluations from one file, in one folder, with the numbers that papers report.

A suite has tasks, policies, training seeds and steps. A *cell* is one combination of them. It is an ordinary evaluation
with its own log. ``definition``, ``cells``, ``ledger`` and ``running`` evaluate the cells. ``scores`` contains the
scores of all runs, ``normalization`` their scales, and ``units`` the units of the bootstrap. ``aggregates``
computes the numbers, ``tables`` writes them as text, and ``figures`` draws them. ``exports`` writes files for other
programs.
"""
