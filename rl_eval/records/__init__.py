"""Values that cross processes: records and their columns, reports, traces, findings of the determinism check.

All parts of the package above ``records`` in ``docs/architecture.md`` may import these modules. No module here does
I/O, except that ``parquet`` reads a file that its caller opened.
"""
