"""What ``forward-influence show`` says about a run of single tokens."""

from __future__ import annotations


def tokens(runs) -> str:
    """Which signal ranks single tokens as their influence does, and whether influence adds up over sets."""
    from forward_influence.analysis.additivity import additivity_table
    from forward_influence.analysis.correlations import correlation_table
    from forward_influence.analysis.stats import few_documents

    correlations, additivity = correlation_table(runs), additivity_table(runs)
    parts = []
    if len(correlations):
        parts += ["", "Spearman correlation of signal and KL over single removed tokens, by offsets, 95% intervals",
                  _by_signal(correlations)]  # fmt: skip
    if len(additivity):
        names = ["size", "chosen_by", "n_sets", "n_documents", "set_kl", "sum_kl", "ratio", "low", "high", "spearman"]
        shown = additivity.loc[additivity.band == "all", names]
        parts += ["", "Mean KL of sets of tokens, sum over their members alone (nats), and ratio with 95% interval",
                  shown.to_string(index=False, float_format=lambda value: f"{value:.3g}")]  # fmt: skip
    counts = [int(table.n_documents.max()) for table in (correlations, additivity) if len(table)]
    if counts and (doubt := few_documents(max(counts))):
        parts += ["", doubt]
    return "\n".join(parts)


def _by_signal(table) -> str:
    """One line per signal, with a column per band."""
    import pandas

    lines = []
    for signal, part in table.groupby("signal", sort=False):
        documents = sorted(set(part.n_documents))
        counts = {"n_documents": f"{documents[0]} to {documents[-1]}" if len(documents) > 1 else f"{documents[0]}"}
        cells = {f"{line.band_start}-{line.band_stop}": _cell(line) for line in part.itertuples()}
        lines.append({"signal": signal} | cells | counts | {"n_tokens": f"{part.n_tokens.median():g}"})
    return pandas.DataFrame(lines).to_string(index=False)


def _cell(line) -> str:
    interval = "" if line.low != line.low else f" ({line.low:.2f} to {line.high:.2f})"
    return f"{line.spearman:.2f}{interval}"
