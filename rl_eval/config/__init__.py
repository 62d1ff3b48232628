"""Configuration of an evaluation: the builder, its frozen settings, and ``"module:attr"`` references.

A configuration contains values and starts no process. ``policies`` and the parts above it in ``docs/architecture.md``
import this part.
"""
