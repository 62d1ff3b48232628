"""Suites: many evaluations from one file, in one folder, with the numbers of papers.

A suite has tasks, policies, training seeds and steps. A *cell* is one combination of them, and an ordinary evaluation
with a log of its own. ``definition``, ``cells``, ``ledger`` and ``running`` evaluate the cells. ``scores`` has the
scores of all runs, ``normalization`` their scales, ``units`` what the bootstrap resamples, ``aggregates`` the numbers,
``tables`` their text, ``figures`` their pictures, and ``exports`` files for other programs.
"""
