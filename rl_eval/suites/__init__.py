"""Suites: several policies on several tasks, each policy from several training runs, and the numbers of papers.

``scores`` has the scores of all runs, ``normalization`` their scales, ``units`` what the bootstrap resamples,
``aggregates`` the numbers, ``tables`` their text, ``figures`` their pictures, and ``exports`` files for other programs.
"""
