"""Named evaluation service: one set of runners for many clients, which can outlive the process that started it."""
