"""Script that asks a Ray cluster for its session and prints how it answers; run by path, in a process of its own.

Ray's client prints lines of its own on file descriptor 2, and aborts its process when a token is configured and not
there; neither may happen to a trainer.
"""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["REFUSES", "main"]

REFUSES: Final = "refuses"
"""Beginning of the answer of a cluster that asks for a token."""


def main(address: str) -> str:
    """Return how the cluster at an address answers: ``ok``, :data:`REFUSES` and its place, or an error."""
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    place = canonicalize_bootstrap_address_or_die(address)
    try:
        GcsClient(address=place).internal_kv_get(b"session_name", b"session", timeout=3)
    except Exception as error:
        refused = type(error).__name__ == "AuthenticationError" or "Unauthenticated" in str(error)
        return f"{REFUSES} {place}" if refused else f"{type(error).__name__}: {error}"
    return "ok"


if __name__ == "__main__":
    print(main(sys.argv[1]))  # noqa: T201
