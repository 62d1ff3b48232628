"""Statistics of a sample of episodes, with intervals; numpy and scipy only."""
