"""Results: from records to numbers, intervals, comparisons, pages and files.

This part reads records and logs. It runs no episodes.
"""
