"""Everything about a study that can be known and checked before weights load."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from forward_influence.accepting import check_tuned_for
from forward_influence.code_hash import code_hashes
from forward_influence.contents import Inputs
from forward_influence.data import load_documents
from forward_influence.errors import UserError
from forward_influence.paths import reachable_path
from forward_influence.request import (
    check_candidates,
    check_listed,
    check_numbers,
    check_positions,
    check_writable,
    parse_shard,
)
from forward_influence.rows import RunSpec, parse_fraction, removal_count
from forward_influence.selectors import DEFAULT_SELECTORS, Selector, make_selectors
from infokv.identity import sizes_of

#: Documents of a study unless said otherwise (arXiv 2606.26875, section on Forward Influence).
DOCUMENTS = 100

#: Seconds between signs of life while documents are tokenised.
_EVERY = 20.0

#: Letters of a model's name in the name of its run's folder; file systems end at 255 bytes.
_STEM = 50


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
        What the user was told.
    accept_model : bool
        Whether scorers that were tuned for another model may be used.
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
    accept_model: bool = False

    @property
    def inputs(self) -> Inputs:
        """Texts and code that rows in the folder must have been made with."""
        texts = {document.id: document.sha for document in self.documents}
        return Inputs(texts | {name: sha for name, _, sha in self.short}, code_hashes(self.selectors))


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
    skip: int = 0,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    offline: bool = False,
    extend_context: str | None = None,
    shard: str | None = None,
    out: str | Path | None = None,
    accept_model: bool = False,
    notify: Callable[[str], None] = lambda sentence: None,
) -> Plan:
    """Check a request and choose its documents; the parameters are those of :func:`measure`.

    Raises
    ------
    UserError, DataError, Refused
        In one sentence, whatever cannot be met.
    """
    check_numbers(prefix=prefix, horizon=horizon, chunk=chunk, sinks=sinks, recent=recent, limit=limit, skip=skip,
                  seed=seed)  # fmt: skip
    place = parse_shard(shard)
    selectors = make_selectors(selector)
    mode = study_mode(selectors)
    if mode == "keep":  # methods have rules and budgets of their own
        fraction, sinks, recent = 1, 0, 0
    else:
        check_candidates(removal_count(prefix, fraction), prefix, sinks, recent, selectors.values())
        check_positions(selectors, prefix)
    if out is not None:
        out = reachable_path(out, "out")
    check_writable(Path("runs") if out is None else out)

    notices: list[str] = []

    def tell(sentence: str) -> None:
        notices.append(sentence)
        notify(sentence)

    source, device, dtype, context = _resolve(
        model, tokenizer, device, dtype, offline, extend_context, prefix + horizon, tell
    )
    for sentence in check_tuned_for(selectors.values(), sizes_of(source.config), accept_model):
        tell(sentence)
    effective = effective_horizon(source.name, context.limit, prefix, horizon, tell)
    corpus = load_documents(data, seed=seed, offline=offline)
    for sentence in (*corpus.notices, *corpus.problems):
        tell(sentence)
    words = _tokenizer(model, source, tell)

    spec = RunSpec(
        model=source.identity,
        dtype=dtype,
        tokenizer=words.identity,
        data=corpus.identity,
        prefix=prefix,
        horizon=effective,
        fraction=format(parse_fraction(fraction).normalize(), "f"),
        chunk=chunk,
        sinks=sinks,
        recent=recent,
        seed=seed,
        full_horizon=full_horizon,
        extend_context=context.method,
        mode=mode,
    )
    documents, short, twins = choose_documents(corpus, words, spec, skip + (limit or DOCUMENTS), notify)
    documents = left_after(skip, documents)
    if twins:
        tell(describe_twins(twins))
    if limit is not None and len(documents) < limit:
        verb = "is" if len(documents) == 1 else "are"
        tell(f"{limit} documents were asked for; {len(documents)} of this corpus {verb} long enough.")
    check_listed(selectors, documents)
    if place is not None:
        documents, short = documents[place[0] - 1 :: place[1]], short[place[0] - 1 :: place[1]]
        if not documents:
            raise UserError(f"shard {shard} has no document: there are fewer than {place[0]}; use fewer shards.")
    return Plan(
        source=source, tokenizer=words, spec=spec, selectors=selectors, documents=documents, short=short,
        out=out if out is not None else default_out(source.name, spec, place),
        device=device, dtype=dtype, notices=notices, accept_model=accept_model,
        requested={"horizon": horizon, "limit": limit, "skip": skip, "fraction": str(fraction), "shard": shard},
        corpus={"name": corpus.name, "identity": corpus.identity, "size": corpus.size},
    )  # fmt: skip


def study_mode(selectors: dict[str, object]) -> str:
    """``"keep"`` for compression methods, ``"remove"`` for selectors; one study has one kind."""
    kinds = {"keep" if hasattr(one, "kept") else "remove" for one in selectors.values()}
    if len(kinds) > 1:
        raise UserError("Selectors remove tokens and methods keep them; measure them in two studies.")
    return kinds.pop()


def default_out(name: str, spec: RunSpec, place: tuple[int, int] | None = None) -> Path:
    """``runs/<model>-<first 8 of the hash>``, so that the same command finds its run again."""
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-")[:_STEM] or "model"
    tail = f"-shard-{place[0]}-of-{place[1]}" if place else ""
    return Path("runs") / f"{stem}-{spec.hash()[:8]}{tail}"


def document_seed(seed: int, document: str) -> int:
    """The seed of a document's randomness: it does not depend on order, batch or resume."""
    digest = hashlib.sha256(f"{seed}\n{document}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big")


def least_length(spec: RunSpec) -> int:
    """Tokens that a document needs: a chunk past the prefix, or the horizon if that is smaller."""
    beyond = spec.horizon if spec.full_horizon else min(spec.chunk, spec.horizon)
    return spec.prefix + beyond


def _resolve(model, tokenizer, device, dtype, offline, extend_context, length, tell):
    """Source, device, dtype and context; a model that is loaded already has brought its own."""
    from forward_influence.context import ContextPlan, plan_context
    from forward_influence.models import LoadedModel, resolve_model
    from forward_influence.placement import resolve_device, resolve_dtype

    if isinstance(model, LoadedModel):
        asked = {"tokenizer": tokenizer, "device": device, "dtype": dtype, "extend_context": extend_context}
        for name, value in asked.items():
            if value not in (None, "auto"):
                raise UserError(f"{name} is {value!r}, but the model is loaded already; give it to load_model instead.")
        check_unchanged(model)
        return model.source, model.device, model.dtype, ContextPlan(None, model.context_limit, model.extend_context)
    if not isinstance(model, str | os.PathLike):
        raise UserError(f"model is a {type(model).__name__}; give a name, a path, or what load_model returned.")
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    source = resolve_model(model, tokenizer=tokenizer, offline=offline, notify=tell)
    context = plan_context(source.config, extend_context, length)
    if context.notice:
        tell(context.notice)
    return source, device, dtype, context


def check_unchanged(model) -> None:
    """Refuse a LoadedModel whose weights are not those that were loaded: rows would carry a wrong name."""
    from forward_influence.checksum import weights_checksum

    if weights_checksum(model.model) != model.checksum:
        raise UserError(
            f"the weights of model {model.source.name!r}, or their dtype, were changed after it was loaded as "
            f"{model.dtype}; save it with save_pretrained and give that folder, or load it again."
        )


def _tokenizer(model, source, tell):
    from forward_influence.models import LoadedModel, load_tokenizer

    return model.tokenizer if isinstance(model, LoadedModel) else load_tokenizer(source, tell)


def effective_horizon(name: str, limit: int | None, prefix: int, horizon: int, tell) -> int:
    if limit is None or prefix + horizon <= limit:
        return horizon
    if prefix >= limit:
        raise UserError(
            f"prefix is {prefix}, but {name} has a context of {limit} tokens; use a smaller prefix, or "
            "--extend-context yarn."
        )
    tell(
        f"Horizon cut from {horizon} to {limit - prefix}: {name} has a context of {limit} tokens "
        "(--extend-context yarn goes past it)."
    )
    return limit - prefix


def choose_documents(corpus, tokenizer, spec: RunSpec, limit: int, notify):
    """The first ``limit`` documents that are long enough, and those met before that are not taken.

    Returns
    -------
    found : list of TokenizedDocument
    short : list of (str, int, str)
        Id, tokens and hash of documents that are too short.
    twins : list of (str, str)
        Id of a document whose measured tokens are those of another one, which is in `found`, and that one's id.
    """
    length, least = spec.prefix + spec.horizon, least_length(spec)
    found, short, twins, longest, told = {}, [], [], 0, time.monotonic()
    for document in corpus.tokenized(tokenizer.encode, length):
        if len(document.ids) < least:
            longest = max(longest, len(document.ids))
            short.append((document.id, len(document.ids), document.sha))
        elif (kept := found.setdefault(document.ids[:length], document)) is not document:
            twins.append((document.id, kept.id))
        elif len(found) == limit:
            break
        if time.monotonic() - told >= _EVERY:
            told = time.monotonic()
            notify(f"{len(found) + len(short)} documents tokenised, {len(found)} of them long enough.")
    if not found:
        raise UserError(
            f"No document is long enough: at least {least} tokens are needed (prefix {spec.prefix}), and the longest "
            f"has {longest}; use a smaller prefix{' or horizon' if spec.full_horizon else ''}, or other data."
        )
    return list(found.values()), short, twins


def left_after(skip: int, documents: list) -> list:
    """The documents behind the first ``skip``; none left is refused."""
    if skip >= len(documents):
        raise UserError(f"skip is {skip}, and {len(documents)} documents are long enough; leave fewer out.")
    return documents[skip:]


def describe_twins(twins: list[tuple[str, str]]) -> str:
    """Which documents were left out because another one has the same text; the first few by name."""
    named = ", ".join(f"{left!r} ({kept!r} is kept)" for left, kept in twins[:3])
    more = f" and {len(twins) - 3} more" if len(twins) > 3 else ""
    return f"Left out, because another document has the same text: {named}{more}."
