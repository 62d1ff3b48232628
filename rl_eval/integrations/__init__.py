"""Integrations of RLlib, TorchRL, SB3, CleanRL and Tianshou: their policies, weights, environments, training loops.

Each is loaded by name, when its framework is there (``adapters.py``). Imported by nothing.
"""
