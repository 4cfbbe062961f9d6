"""What trying many settings on one document costs against measuring each alone; part of ``make bench``."""

from __future__ import annotations

import time
from itertools import islice
from types import SimpleNamespace

SETTINGS, ALONE, PREFIX, HORIZON = 24, 3, 2048, 512


def measure_tuning(model, ids) -> dict:
    """Seconds of all settings at once, and of some alone, for ``latest.json``.

    Parameters
    ----------
    ids : int Tensor ``[1, tokens]``
        At least ``PREFIX + HORIZON`` tokens of real text.
    """
    from forward_influence.document import measure_document
    from forward_influence.objectives import Objective
    from forward_influence.rows import RunSpec
    from forward_influence.search import make_space

    document = SimpleNamespace(id="text", sha="0" * 16, ids=ids[0, : PREFIX + HORIZON].tolist())
    spec = RunSpec("model", "float32", "tokenizer", "data", prefix=PREFIX, horizon=HORIZON, mode="keep")
    settings = list(islice(make_space("infokv", None).random(0), SETTINGS))
    methods = {one.canonical(): one for one in Objective("fidelity", "0.4").selectors(settings)}

    def timed(chosen: dict) -> tuple[float, list[dict]]:
        began = time.perf_counter()
        rows = measure_document(model, document, chosen, spec)
        return time.perf_counter() - began, rows

    together, rows = timed(methods)
    curves = {tuple(row["kl"]) for row in rows}
    alone = [timed({name: methods[name]})[0] for name in list(methods)[:: SETTINGS // ALONE]]
    return {
        "settings": SETTINGS,
        "settings_that_differ": len(curves),
        "seconds_together": together,
        "seconds_alone": sum(alone) / len(alone),
        "tuning_share_of_separate": together / (SETTINGS * sum(alone) / len(alone)),
    }
