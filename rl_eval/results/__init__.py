"""Results: from records to numbers, intervals, comparisons, pages and files.

This package reads records and logs. It runs no episodes.
"""
