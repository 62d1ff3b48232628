"""Results: from records to numbers, intervals, comparisons, pages and files.

It reads records and logs, and runs no episodes.
"""
