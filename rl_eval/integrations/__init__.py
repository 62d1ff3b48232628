"""How policies, weights and environments of RLlib, TorchRL and Stable-Baselines3 are evaluated."""
