"""Configuration of an evaluation: the builder, its frozen settings, and ``"module:attr"`` references.

Contains values only and starts nothing. Imported by everything from ``policies/`` up.
"""
