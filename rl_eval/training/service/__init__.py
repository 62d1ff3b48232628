"""Named evaluation service: one set of runners for many clients.

The service can continue after the process that started it has ended.
"""
