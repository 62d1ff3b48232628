"""One script per contender; each measures one cell of a scenario and prints one JSON line."""
