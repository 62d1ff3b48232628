"""Recording: episodes that run again or step by step, as replays, videos, trajectories and samples."""
