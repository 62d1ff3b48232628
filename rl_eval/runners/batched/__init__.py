"""Runner of simulators that step many slots in one call, and their adapters."""
