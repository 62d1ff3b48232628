"""Evaluation beside a training loop: evaluator, schedule of evaluations, callbacks, delivery of results, named service.

Built on ``execution/``, of which it sees the group and its handles only. Imported by integrations and the command line.
"""
