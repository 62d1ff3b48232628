"""Suites: many evaluations from one file, in one folder, with the numbers of papers.

A suite has tasks, policies, training seeds and steps. A *cell* is one combination of them, and an ordinary evaluation
with its own log. ``definition``, ``cells``, ``ledger`` and ``running`` evaluate the cells. ``scores`` has the scores of
all runs, ``normalization`` their scales, and ``units`` the units of the bootstrap. ``aggregates`` computes the numbers,
``tables`` their text, and ``figures`` their pictures. ``exports`` writes files for other programs.
"""
