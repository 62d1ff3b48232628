"""Integrations of RLlib, TorchRL and Stable-Baselines3: their policies, weights, environments and training loops.

Each is loaded by name, when its framework is there (``adapters.py``). Imported by nothing.
"""
