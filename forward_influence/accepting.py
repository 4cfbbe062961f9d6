"""Scorers that were tuned for another model: refused, or accepted with a notice."""

from __future__ import annotations

from collections.abc import Iterable

from infokv.identity import ModelIdentity, foreign, refuse_foreign


def check_tuned_for(scorers: Iterable, model: ModelIdentity, accept: bool) -> list[str]:
    """What has to be told about scorers that were tuned for another model than this.

    Parameters
    ----------
    scorers : iterable
        Scorers, selectors and methods; those that were not tuned are of no interest.
    model : ModelIdentity
        As far as it is known.
    accept : bool
        Whether such scorers may be used all the same.

    Raises
    ------
    Refused
        If there is one and it is not accepted.
    """
    notices = []
    for one in scorers:
        scorer = getattr(one, "scorer", one)
        if not accept:
            refuse_foreign(scorer, model)
        elif sentence := foreign(scorer, model):
            notices.append(f"{sentence}; accepted, as asked.")
    return list(dict.fromkeys(notices))
