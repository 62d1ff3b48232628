"""Reports of a result: on a terminal, as flat metrics, and on disk."""
