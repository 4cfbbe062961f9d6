"""What ``forward-influence show`` says about a run of compression methods."""

from __future__ import annotations


def rates(runs) -> str:
    """What each method loses at each budget, and how each two differ at equal ones."""
    from forward_influence.analysis.rate_distortion import rate_differences, rate_table
    from forward_influence.analysis.stats import few_documents

    table, differences = rate_table(runs), rate_differences(runs)
    intervals = (table.n_documents > 1).any()
    bounds = ["kl_low", "kl_high"] if intervals else []
    parts = ["", "KL in nats, mean over documents; budget: share of the prefix kept"]
    parts.append(_text(table, ["method", "asked", "budget"], bounds, ["delta_nll", "top1_changed"]))
    if len(differences) and intervals:
        parts += ["", "Differences of mean KL at equal budgets, a minus b, with paired 95% intervals over documents"]
        parts.append(_text(differences, ["asked", "a", "b"], bounds, []))
    if beaten := reference_beaten(differences):
        parts += ["", *beaten]
    if doubt := few_documents(int(table.n_documents.max())):
        parts += ["", doubt]
    return "\n".join(parts)


def reference_beaten(differences) -> list[str]:
    """Where a method loses less than the cache of the tokens that cost most alone, by an interval without 0."""
    sentences = []
    for line in differences.itertuples():
        for reference, other, sure in ((line.a, line.b, line.kl_low > 0), (line.b, line.a, line.kl_high < 0)):
            if sure and reference.startswith("influence:") and not other.startswith("influence:"):
                sentences.append(
                    f"At {line.asked}, offsets {line.band_start}-{line.band_stop}, {other} loses less than {reference}:"
                    " measured influence of single tokens is a reference, not a bound."
                )
    return sentences


def _text(table, names: list[str], bounds: list[str], more: list[str]) -> str:
    offsets = [f"{line.band_start}-{line.band_stop}" for line in table.itertuples()]
    columns = [*names, "offsets", "n_documents", "kl", *bounds, *more]
    return table.assign(offsets=offsets)[columns].to_string(index=False, float_format=lambda value: f"{value:.3g}")
