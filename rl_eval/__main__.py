"""``python -m rl_eval`` is ``rl-eval``."""

from __future__ import annotations

from rl_eval.cli import main

if __name__ == "__main__":
    main()
