"""Values that cross processes: records and their columns, reports, traces, findings of the determinism check.

No module here does I/O. All parts of the package except ``errors`` and ``protocols`` may import these modules.
"""
