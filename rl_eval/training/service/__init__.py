"""A named evaluation service: one set of runners that outlives the process that started it, for many clients."""
