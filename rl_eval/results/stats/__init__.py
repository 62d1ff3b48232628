"""Statistics of a sample of episodes, with intervals, in NumPy and SciPy."""
