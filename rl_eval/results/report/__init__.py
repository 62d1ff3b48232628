"""How a result looks: on a terminal, as flat metrics, and on disk."""
