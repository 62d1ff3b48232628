"""Benchmarks against peers and limits: ``python -m benchmarks --help``."""
