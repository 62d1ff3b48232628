"""Report of results as one HTML page that needs nothing else: numbers, charts, faults, and every episode."""
