"""Evaluation during training: evaluator, schedule of evaluations, callbacks, delivery of results, named service.

It uses the group and the handles of ``execution/``. Integrations and the command line import it.
"""
