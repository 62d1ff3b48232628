"""Results: from records to numbers, intervals, comparisons, pages and files.

Reads records and logs, and runs nothing but a replay. Imported by ``execution/`` and everything above.
"""
