"""Configuration of an evaluation: the builder, the frozen settings that it makes, and ``"module:attr"`` references.

Values only: nothing here starts anything. Imported by everything from ``policies/`` up.
"""
