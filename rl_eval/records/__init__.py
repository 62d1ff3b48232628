"""Values that cross processes: records and their columns, reports, traces, findings of the determinism check.

No module here does I/O. All parts except ``errors`` and ``protocols`` may import them.
"""
