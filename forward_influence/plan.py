"""Everything about a study that can be known and checked before weights load."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from forward_influence.errors import UserError
from forward_influence.rows import RunSpec, parse_fraction, removal_count
from forward_influence.selectors import DEFAULT_SELECTORS, Positions, Selector, make_selectors

#: Documents of a study unless said otherwise (arXiv 2606.26875, section on Forward Influence).
DOCUMENTS = 100


@dataclass(frozen=True)
class Plan:
    """A study that has passed all checks but those that need weights.

    Attributes
    ----------
    source : ModelSource
    tokenizer : LoadedTokenizer
    spec : RunSpec
        Its horizon is the effective one.
    selectors : dict of str to Selector
        By canonical text.
    documents : list of TokenizedDocument
        Long enough, in order; of this shard.
    short : list of (str, int, str)
        Id, tokens and hash of documents met on the way that are too short.
    out : Path
    device, dtype : str
    requested : dict
        What was asked for, where it differs from what is done.
    corpus : dict
        Name, identity and size of the corpus.
    notices : list of str
    """

    source: object
    tokenizer: object
    spec: RunSpec
    selectors: dict[str, Selector]
    documents: list
    short: list[tuple[str, int, str]]
    out: Path
    device: str
    dtype: str
    requested: dict
    corpus: dict
    notices: list[str] = field(default_factory=list)

    @property
    def needs(self) -> tuple[str, ...]:
        """Signals that the selectors read, each once."""
        return tuple(dict.fromkeys(name for one in self.selectors.values() for name in one.needs))


def make_plan(
    *,
    model="smollm2-135m",
    tokenizer: str | None = None,
    data=None,
    selector: Iterable = DEFAULT_SELECTORS,
    fraction: str | float = "0.01",
    prefix: int = 2048,
    horizon: int = 14000,
    full_horizon: bool = False,
    chunk: int = 128,
    sinks: int = 4,
    recent: int = 64,
    limit: int | None = None,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    offline: bool = False,
    extend_context: str | None = None,
    shard: str | None = None,
    out: str | Path | None = None,
    notify: Callable[[str], None] = lambda sentence: None,
) -> Plan:
    """Check a request and choose its documents; the parameters are those of :func:`measure`.

    Raises
    ------
    UserError, DataError, Refused
        In one sentence, whatever cannot be met.
    """
    selectors = make_selectors([selector] if isinstance(selector, str) else selector)
    check_numbers(prefix=prefix, horizon=horizon, chunk=chunk, sinks=sinks, recent=recent, limit=limit, seed=seed)
    place = parse_shard(shard)
    count = removal_count(prefix, fraction)
    _check_candidates(count, prefix, sinks, recent, selectors)
    if out is not None:
        _check_writable(Path(out))

    from forward_influence.models import load_tokenizer, resolve_model
    from forward_influence.placement import resolve_device, resolve_dtype

    # A LoadedModel has its weights already, and its own device, dtype and tokenizer.
    device = model.device if hasattr(model, "source") else resolve_device(device)
    dtype = model.dtype if hasattr(model, "source") else resolve_dtype(dtype, device)
    source = model.source if hasattr(model, "source") else resolve_model(model, tokenizer=tokenizer, offline=offline)
    notices: list[str] = []
    effective = _effective_horizon(source, prefix, horizon, extend_context, notices)
    corpus = _load_corpus(data, seed, offline)
    notices += [*corpus.notices, *corpus.problems]
    for sentence in notices:
        notify(sentence)
    loaded_tokenizer = model.tokenizer if hasattr(model, "source") else load_tokenizer(source)

    spec = RunSpec(
        model=source.identity,
        dtype=dtype,
        tokenizer=loaded_tokenizer.identity,
        data=corpus.identity,
        prefix=prefix,
        horizon=effective,
        fraction=format(parse_fraction(fraction).normalize(), "f"),
        chunk=chunk,
        sinks=sinks,
        recent=recent,
        seed=seed,
        full_horizon=full_horizon,
        extend_context=extend_context,
    )
    documents, short = _choose(corpus, loaded_tokenizer, spec, limit or DOCUMENTS)
    if limit is not None and len(documents) < limit:
        notices.append(f"{limit} documents were asked for; {len(documents)} of this corpus are long enough.")
        notify(notices[-1])
    if place is not None:
        documents = documents[place[0] - 1 :: place[1]]
        short = short[place[0] - 1 :: place[1]]
        if not documents:
            raise UserError(f"shard {shard} has no document: there are fewer than {place[0]}; use fewer shards.")
    folder = Path(out) if out is not None else default_out(source.name, spec, place)
    if out is None:
        _check_writable(folder)
    return Plan(
        source=source, tokenizer=loaded_tokenizer, spec=spec, selectors=selectors, documents=documents, short=short,
        out=folder, device=device, dtype=dtype, notices=notices,
        requested={"horizon": horizon, "limit": limit, "fraction": str(fraction), "shard": shard},
        corpus={"name": corpus.name, "identity": corpus.identity, "size": corpus.size},
    )  # fmt: skip


def check_numbers(*, prefix, horizon, chunk, sinks, recent, limit, seed) -> None:
    """Refuse numbers that make no study."""
    rules = {
        "prefix": (prefix, 1, "tokens that are cached before anything is removed"),
        "horizon": (horizon, 1, "tokens that follow the prefix"),
        "chunk": (chunk, 1, "offsets over which a reported number is averaged"),
        "sinks": (sinks, 0, "first positions that are not candidates"),
        "recent": (recent, 0, "last positions of the prefix that are not candidates"),
        "limit": (limit, 1, "documents"),
        "seed": (seed, 0, "a whole number"),
    }
    for name, (value, least, meaning) in rules.items():
        if value is None and name == "limit":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{name} is {value}; it must be a whole number of at least {least} ({meaning}).")


def parse_shard(shard: str | None) -> tuple[int, int] | None:
    """``"3/16"`` as (3, 16): the third of sixteen; None for none."""
    if shard is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", shard.strip())
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"shard {shard!r} is not of the form 3/16, from 1/16 to 16/16.")
    return int(match[1]), int(match[2])


def default_out(name: str, spec: RunSpec, place: tuple[int, int] | None = None) -> Path:
    """``runs/<model>-<first 8 of the hash>``, so that the same command finds its run again."""
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-") or "model"
    tail = f"-shard-{place[0]}-of-{place[1]}" if place else ""
    return Path("runs") / f"{stem}-{spec.hash()[:8]}{tail}"


def document_seed(seed: int, document: str) -> int:
    """The seed of a document's randomness: it does not depend on order, batch or resume."""
    digest = hashlib.sha256(f"{seed}\n{document}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


def least_length(spec: RunSpec) -> int:
    """Tokens that a document needs: a chunk past the prefix, or the horizon if that is smaller."""
    beyond = spec.horizon if spec.full_horizon else min(spec.chunk, spec.horizon)
    return spec.prefix + beyond


def _check_candidates(count: int, prefix: int, sinks: int, recent: int, selectors: dict[str, Selector]) -> None:
    candidates = prefix - sinks - recent
    if candidates < count:
        raise UserError(
            f"{count} of {prefix} prefix positions are to be removed, but {max(0, candidates)} are candidates after "
            f"{sinks} sinks and {recent} recent ones; use a larger prefix, a smaller fraction, or fewer of these."
        )
    for name, selector in selectors.items():
        if isinstance(selector, Positions):
            listed = selector.by_document or {"": selector.select(None, 0, "")}
            worst = max((place for places in listed.values() for place in places), default=0)
            least = min((place for places in listed.values() for place in places), default=0)
            if worst >= prefix or least < 0:
                raise UserError(
                    f"{name} has position {worst if worst >= prefix else least}, which is outside the prefix; "
                    f"positions go from 0 to {prefix - 1}."
                )


def _effective_horizon(source, prefix: int, horizon: int, extend_context: str | None, notices: list[str]) -> int:
    limit = source.context_limit
    if extend_context is not None or limit is None or prefix + horizon <= limit:
        return horizon
    if prefix >= limit:
        raise UserError(
            f"prefix is {prefix}, but {source.name} has a context of {limit} tokens; use a smaller prefix, or "
            "--extend-context yarn."
        )
    notices.append(
        f"Horizon cut from {horizon} to {limit - prefix}: {source.name} has a context of {limit} tokens "
        "(--extend-context yarn goes past it)."
    )
    return limit - prefix


def _load_corpus(data, seed: int, offline: bool):
    from forward_influence.data import load_documents
    from forward_influence.hub import hub_reachable

    return load_documents(data, seed=seed, offline=offline, hub_reachable=hub_reachable)


def _choose(corpus, tokenizer, spec: RunSpec, limit: int):
    """The first ``limit`` documents that are long enough, and the shorter ones met before."""
    length, least = spec.prefix + spec.horizon, least_length(spec)
    found, short, longest = [], [], 0
    for document in corpus.tokenized(tokenizer.encode, length):
        if len(document.ids) >= least:
            found.append(document)
            if len(found) == limit:
                break
        else:
            longest = max(longest, len(document.ids))
            short.append((document.id, len(document.ids), document.sha))
    if not found:
        raise UserError(
            f"No document is long enough: at least {least} tokens are needed (prefix {spec.prefix}), and the longest "
            f"has {longest}; use a smaller prefix{' or horizon' if spec.full_horizon else ''}, or other data."
        )
    return found, short


def _check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, before anything is computed."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"out is {str(folder)!r}, which is a file; give a folder.")
    place = folder
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{str(folder)!r} cannot be written ({str(place)!r} is not writable); give another --out.")
