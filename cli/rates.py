"""What ``forward-influence show`` says about a run of compression methods."""

from __future__ import annotations


def rates(runs) -> str:
    """What each method loses at each budget, the least first, and how much more that is than the least."""
    from forward_influence.analysis.rate_distortion import rate_differences, rate_table
    from forward_influence.analysis.stats import few_documents

    table, differences = rate_table(runs), rate_differences(runs)
    parts = []
    for asked, part in table.groupby("asked", sort=False):
        kept = _kept(part.budget)
        head = f"At budget {asked} ({kept} of the prefix kept): KL in nats, mean over documents, by offsets"
        parts += ["", head, _least_first(part, differences[differences.asked == asked])]
    if (table.n_documents > 1).any():
        folders = " ".join(str(run.path) for run in runs.runs)
        parts += ["", "In brackets: 95% intervals over documents, paired for `more`, the difference to the least in "
                  f"common documents. All pairs and bands: forward-influence plot {folders} writes them."]  # fmt: skip
    if beaten := reference_beaten(differences):
        parts += ["", *beaten]
    if doubt := few_documents(int(table.n_documents.max())):
        parts += ["", doubt]
    return "\n".join(parts)


def _kept(shares) -> str:
    """Shares that were kept: methods may differ where a layer has fewer tokens than its budget."""
    ends = dict.fromkeys((_short(shares.min()), _short(shares.max())))
    return " to ".join(ends)


def _least_first(table, differences) -> str:
    """One line per method: KL of all offsets and of each band, the other metrics, and the difference to the least."""
    import pandas

    whole = table[table.band == "all"].sort_values("kl", kind="stable").set_index("method")
    least = whole.index[whole.n_documents == whole.n_documents.max()][0]  # not one that has but a few easy documents
    more = {least: "0"}
    for line in differences[differences.band == "all"].itertuples():
        if line.a == least:
            more[line.b] = _cell(0.0 - line.kl, 0.0 - line.kl_high, 0.0 - line.kl_low)  # no minus zero
        elif line.b == least:
            more[line.a] = _cell(line.kl, line.kl_low, line.kl_high)
    widest = max(map(len, whole.index))
    columns = [
        (f"{whole.band_start.min()}-{whole.band_stop.max()}", map(_cell, whole.kl, whole.kl_low, whole.kl_high)),
        ("more", [more.get(name, "") for name in whole.index]),
        *(
            (f"{part.band_start.iloc[0]}-{part.band_stop.iloc[0]}",
             part.set_index("method").kl.reindex(whole.index).map(_short))
            for _, part in table[table.band != "all"].groupby("band", sort=False)
        ),
        *((name, whole[name].map(_short)) for name in ("delta_nll", "top1_changed")),
        ("documents", whole.n_documents),
        ("method".ljust(widest), [name.ljust(widest) for name in whole.index]),  # last, because it may be long
    ]  # fmt: skip
    names, values = zip(*columns)
    shown = pandas.DataFrame(dict(enumerate(map(list, values))))  # two bands may have the same offsets
    text = shown.to_string(index=False, header=list(names))
    return "\n".join(line.rstrip() for line in text.splitlines())


def _cell(value: float, low: float, high: float) -> str:
    return _short(value) if low != low else f"{_short(value)} [{_short(low)}, {_short(high)}]"


def _short(value: float) -> str:
    return f"{value:.3g}"


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
