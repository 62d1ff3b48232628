"""Values that cross processes: records and their columns, reports, traces, findings of the determinism check.

Nothing here does I/O. Imported by everything but errors and protocols.
"""
