"""Suites: many evaluations from one file, in one folder, with the numbers that papers report.

A suite has tasks, policies, training seeds and steps. A *cell* is one combination of them. It is an ordinary evaluation
with its own log. The modules ``definition``, ``cells``, ``ledger`` and ``running`` evaluate the cells. ``scores``
contains the scores of all training runs, ``normalization`` the scales of the scores, and ``units`` the units of the
bootstrap. ``aggregates`` computes tables of estimates, ``tables`` writes these tables as text, and ``figures`` draws
them. ``exports`` writes files for other programs.
"""
