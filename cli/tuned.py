"""What a tuning found, as text."""

from __future__ import annotations


def report(path: str) -> str:
    """The chosen parameters, and what they are worth on the held-out documents."""
    from forward_influence.analysis.tuning_report import describe_tuning

    return describe_tuning(path)
