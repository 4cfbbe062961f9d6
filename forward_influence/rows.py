"""What a run is and what one line of it holds. No torch: analysis and command line read this alone."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from decimal import Decimal, InvalidOperation

from forward_influence.errors import UserError

SCHEMA_VERSION = 1

#: Mean KL below this is what the arithmetic leaves where nothing has changed (float32); its order says nothing.
NOISE = 1e-12

#: Every field of a row, in the order in which it is written. Lists run over chunks, except `kl`
#: (one value per offset) and `removed` (positions).
ROW_FIELDS = (
    "key",  # hash of spec, document and selector: the resume key
    "document",  # stable document id
    "document_sha",  # sha256 of the document's tokens, first 16 hex digits
    "selector",  # canonical selector string
    "mode",  # "remove": the selected positions are hidden; "keep": the selector is a method at a budget
    "status",  # "ok", "skipped" or "failed"
    "reason",  # why skipped or failed; None for "ok"
    "n_tokens",  # tokens of the document
    "removed",  # removed prefix positions, ascending; shared by all layers and heads
    "n_removed",  # in mode "keep" the mean over layers, rounded
    "removed_fraction",  # realised, of the prefix
    "kept_fraction",  # realised, of the prefix; mean over layers
    "kept_counts",  # tokens that each layer keeps, in mode "keep"; the sets follow from the key
    "chunk_start",  # first offset of each chunk
    "chunk_count",  # offsets in each chunk
    "kl_mean",  # nats, mean over the chunk; float or inf
    "kl",  # nats, one value per offset, rounded to 6 significant digits
    "delta_nll",  # nats per token, ablated minus full, mean over the chunk's offsets with a known next token
    "nll_count",  # offsets of the chunk whose next token is known
    "top1_changed",  # share of the chunk's offsets whose most likely token changed
    "seconds",  # wall-clock time, the document's time shared equally among its rows
)

STATUSES = ("ok", "skipped", "failed")

#: The fields of a row that hold one value per chunk.
CHUNK_FIELDS = ("chunk_start", "chunk_count", "kl_mean", "delta_nll", "nll_count", "top1_changed")


@dataclass(frozen=True)
class RunSpec:
    """Every choice that changes a number. Equal hashes mean that rows may be joined.

    Parameters
    ----------
    model : str
        Identity of the weights (revision or fingerprint), not their path.
    dtype : str
        Resolved dtype, such as ``"float32"``.
    tokenizer : str
        Identity of the tokenizer, special tokens included.
    data : str
        Identity of the corpus where its text depends on the machine (``builtin`` carries a hash),
        otherwise its kind (``"local"``, ``"arxiv"``).
    prefix, horizon : int
        Tokens. ``horizon`` is the effective one, after a cut to the context limit.
    fraction : str
        Share of the prefix that is removed, as the decimal that was typed, normalised. In mode ``"keep"`` the
        budget is in the selector's name, and this is 1.
    chunk : int
        Width of reporting, offsets.
    sinks, recent : int
        Positions at the start and the end of the prefix that are not candidates. In mode ``"keep"`` each scorer
        has its own rules, and these are 0.
    seed : int
    full_horizon : bool
        Whether documents that end before the horizon are skipped.
    extend_context : str or None
        Method by which a RoPE model goes past its limit.
    mode : str
        What a row measures; ``"remove"`` or ``"keep"``.
    """

    model: str
    dtype: str
    tokenizer: str
    data: str
    prefix: int = 2048
    horizon: int = 14000
    fraction: str = "0.01"
    chunk: int = 128
    sinks: int = 4
    recent: int = 64
    seed: int = 0
    full_horizon: bool = False
    extend_context: str | None = None
    mode: str = "remove"

    def hash(self) -> str:
        """Hex digest over all fields and the schema version; stable across machines and versions."""
        payload = {"schema": SCHEMA_VERSION, **asdict(self)}
        return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict:
        return asdict(self)

    def sentence(self) -> str:
        """The study for a person."""
        candidates = f"candidates {self.sinks} to {self.prefix - self.recent - 1}"
        what = f"fraction {self.fraction}, {candidates}" if self.mode == "remove" else "compressed caches"
        return f"prefix {self.prefix}, horizon {self.horizon}, {what}, chunk {self.chunk}, seed {self.seed}"

    @classmethod
    def from_dict(cls, values: dict) -> RunSpec:
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True)
class InfluenceCurve:
    """KL in nats per chunk of offsets, with counts: Forward Influence of one set on one document.

    Source: arXiv 2606.26875, definition of Forward Influence.

    Attributes
    ----------
    document, selector : str
    chunk_start, chunk_count : tuple of int
        First offset of each chunk and the number of offsets in it.
    kl_mean : tuple of float
        Nats, mean over the chunk; ``inf`` is possible.
    spec_hash : str
        Hash of the :class:`RunSpec` under which it was measured.
    """

    document: str
    selector: str
    chunk_start: tuple[int, ...]
    chunk_count: tuple[int, ...]
    kl_mean: tuple[float, ...]
    spec_hash: str

    @classmethod
    def from_row(cls, row: dict, spec_hash: str) -> InfluenceCurve:
        """The curve of a row with status ``ok``."""
        if row["status"] != "ok":
            raise UserError(
                f"Row of document {row['document']!r} has status {row['status']!r}, which has no curve; "
                "take rows with status 'ok'."
            )
        return cls(
            row["document"],
            row["selector"],
            tuple(row["chunk_start"]),
            tuple(row["chunk_count"]),
            tuple(row["kl_mean"]),
            spec_hash,
        )

    @property
    def mean(self) -> float:
        """Mean over all offsets, nats."""
        total = sum(count * value for count, value in zip(self.chunk_count, self.kl_mean))
        return total / sum(self.chunk_count)


def row_key(spec_hash: str, document: str, selector: str) -> str:
    """Resume key of a row: spec hash + document id + canonical selector string."""
    text = json.dumps([spec_hash, document, selector])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def parse_fraction(typed: str | float | Decimal) -> Decimal:
    """A share in (0, 1] as the exact decimal that was typed.

    Raises
    ------
    UserError
        If it is no number in (0, 1].
    """
    try:
        value = Decimal(str(typed))
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or not 0 < value <= 1:
        raise UserError(f"fraction {str(typed)!r} is not a number above 0 and at most 1; try 0.01.")
    return value


def removal_count(n: int, fraction: str | float | Decimal) -> int:
    """``max(1, floor(n * fraction))``, exact on the decimal that was typed."""
    return max(1, int(n * parse_fraction(fraction)))


def dumps_row(row: dict) -> str:
    """One strict-JSON line without the newline; infinities become the strings ``"inf"``, ``"-inf"``.

    Raises
    ------
    ValueError
        If a number is NaN: a value that could not be computed is never written.
    """
    return json.dumps(_tag_infinities(row), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def loads_row(line: str) -> dict:
    """Inverse of :func:`dumps_row`; strict: bare ``NaN`` and ``Infinity`` are refused."""
    row = json.loads(line, parse_constant=_refuse_constant)
    if not isinstance(row, dict):
        raise ValueError("a row is a JSON object")
    if 'inf"' not in line:  # the usual case: spares a look at every number
        return row
    return {name: _untag(value) if name in _NUMERIC_FIELDS else value for name, value in row.items()}


_NUMERIC_FIELDS = frozenset({"kl_mean", "kl", "delta_nll", "top1_changed"})


def _tag_infinities(value):
    if isinstance(value, dict):
        return {name: _tag_infinities(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tag_infinities(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def _untag(value):
    if isinstance(value, list):
        return [_untag(item) for item in value]
    return float(value) if value in ("inf", "-inf") else value


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not strict JSON")
