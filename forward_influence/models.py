"""A model that is ready to be measured: loaded, frozen, checked, and described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forward_influence import hub
from forward_influence.aliases import DEFAULT_MODEL, describe_models
from forward_influence.checksum import weights_checksum
from forward_influence.context import ContextPlan, plan_context, verify_extension
from forward_influence.errors import UserError
from forward_influence.gguf_cache import weights_folder
from forward_influence.gguf_header import read_header
from forward_influence.placement import resolve_attention, resolve_device, resolve_dtype, torch_dtype
from forward_influence.quiet import print_notice, quiet_libraries
from forward_influence.sources import ModelSource, resolve_model
from forward_influence.tokenization import LoadedTokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

__all__ = [
    "LoadedModel",
    "LoadedTokenizer",
    "ModelSource",
    "describe_models",
    "load_model",
    "load_tokenizer",
    "resolve_model",
]


@dataclass
class LoadedModel:
    """A model with what was decided about it.

    Attributes
    ----------
    model : PreTrainedModel
        In evaluation mode, without gradients.
    tokenizer : LoadedTokenizer
    source : ModelSource
    dtype : str
        Of the parameters, verified.
    device : str
    attention : str
        Attention function of plain forwards.
    context_limit : int or None
        Tokens that fit, after an extension.
    extend_context : str or None
        What an extension changed, such as ``"yarn:8192->16048"``.
    check : dict
        Result of the reference check; empty if it was not asked for.
    notices : list of str
        What the user was told on the way.
    checksum : str
        Of the weights when this object was made; a study refuses them if they were changed since.
    """

    model: Any
    tokenizer: LoadedTokenizer
    source: ModelSource
    dtype: str
    device: str
    attention: str
    context_limit: int | None
    extend_context: str | None = None
    check: dict = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    checksum: str = field(init=False, repr=False)

    def __post_init__(self):
        self.checksum = weights_checksum(self.model)


def load_model(
    model: str | Path | ModelSource = DEFAULT_MODEL,
    *,
    tokenizer: str | Path | LoadedTokenizer | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | int | torch.device = "auto",
    attention: str | None = None,
    offline: bool = False,
    extend_context: str | None = None,
    target_length: int | None = None,
    check: bool = True,
    trust_remote_code: bool = False,
    notify: Callable[[str], None] = print_notice,
) -> LoadedModel:
    """Load a model and its tokenizer, and check that this package measures it rightly.

    Parameters
    ----------
    model : str, Path or ModelSource
        Folder, ``.gguf`` file, alias, hub id, or the result of :func:`resolve_model` (whose tokenizer,
        `offline` and `trust_remote_code` then hold).
    tokenizer : str, Path or LoadedTokenizer, optional
        Folder or hub id of another tokenizer; or the one that :func:`load_tokenizer` gave, to load it once.
    dtype : str or torch.dtype
        ``auto``, ``float32``, ``bfloat16``, ``float16`` or ``float64``.
    device : str, int or torch.device
        ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; a number N is ``cuda:N``.
    attention : str, optional
        Attention function of plain forwards; the measurement brings its own.
    offline : bool
        Make no network attempt at all.
    extend_context : str, optional
        ``"yarn"``: let `target_length` tokens fit into a RoPE model with a shorter context.
    target_length : int, optional
        Tokens that must fit, prefix and horizon together.
    check : bool
        Run the reference check (about a second).
    trust_remote_code : bool
        Run code that comes with the model.
    notify : callable
        Receives notices, one sentence each; printed on stderr by default.

    Raises
    ------
    UserError
        If the request cannot be met. All that can be known before weights load is said before.
    """
    notices: list[str] = []

    def tell(message: str) -> None:
        notices.append(message)
        notify(message)

    words = tokenizer if isinstance(tokenizer, LoadedTokenizer) else None
    if words is not None:
        tokenizer = None
    if isinstance(model, ModelSource) and tokenizer is not None:
        raise UserError("a resolved model brings its tokenizer; give tokenizer to resolve_model instead.")
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    attention = resolve_attention(attention, device)
    if isinstance(model, ModelSource):
        source = model
    else:
        source = resolve_model(
            model, tokenizer=tokenizer, offline=offline, trust_remote_code=trust_remote_code, notify=tell
        )
    plan = plan_context(source.config, extend_context, target_length)
    if plan.notice:
        tell(plan.notice)
    words = words or load_tokenizer(source, tell)
    network = _load_weights(source, plan, dtype, attention, tell).to(device)
    verify_extension(network, plan.method)
    result = {}
    if check:
        from infokv.errors import Refused
        from infokv.modelcheck import ensure_checked

        try:
            result = ensure_checked(network)
        except Refused as error:
            raise UserError(str(error)) from error
    return LoadedModel(
        network,
        words,
        source,
        dtype,
        device,
        network.config._attn_implementation,
        plan.limit,
        plan.method,
        result,
        notices,
    )


def _load_weights(
    source: ModelSource, plan: ContextPlan, dtype: str, attention: str | None, tell: Callable[[str], None]
) -> Any:
    from transformers import AutoModelForCausalLM

    from infokv.errors import is_out_of_memory

    folder = _weights_folder(source, tell)
    try:
        with quiet_libraries():
            network, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=plan.config,
                dtype=torch_dtype(dtype),
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=source.trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:  # a damaged file can fail here in any way
        if is_out_of_memory(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
        raise UserError(
            f"the weights of model {source.path!r} cannot be loaded ({reason}); fetch them again or choose "
            "another model."
        ) from error
    _refuse_random_weights(network, info, source)
    _verify_dtype(network, dtype, source)
    if info["unexpected_keys"]:
        names = sorted(info["unexpected_keys"])
        tell(f"{len(names)} tensors of {source.path!r} are not used by this model (first: {names[0]}).")
    return network.eval().requires_grad_(False)


def _weights_folder(source: ModelSource, tell: Callable[[str], None]) -> Path:
    if source.kind == "gguf":
        return weights_folder(read_header(Path(source.path)), source.gguf_sha256, tell)
    if source.kind == "hub":
        return hub.fetch_weights(source.path, Path(source.folder), offline=source.offline)
    return Path(source.folder)


def _refuse_random_weights(network: Any, info: dict, source: ModelSource) -> None:
    """transformers fills what a file lacks with random numbers and says so in a log line."""
    absent = sorted({str(key) for kind in ("missing_keys", "mismatched_keys") for key in info[kind]})
    if absent:
        raise UserError(
            f"model {source.path!r} lacks {len(absent)} weights of its own configuration (first: "
            f"{absent[0]}), which would be random; fetch it again or choose another model."
        )
    head, embeddings = network.get_output_embeddings(), network.get_input_embeddings()
    tied = getattr(network.config, "tie_word_embeddings", False)
    if tied and head is not None and head.weight.data_ptr() != embeddings.weight.data_ptr():
        raise UserError(
            f"model {source.path!r} says that its output layer is its embedding matrix, but they were loaded "
            "apart; choose another version of transformers or of the model."
        )


def _verify_dtype(network: Any, dtype: str, source: ModelSource) -> None:
    found = {parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()}
    if found != {torch_dtype(dtype)}:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in found))
        raise UserError(
            f"model {source.path!r} was asked for in {dtype}, but its parameters are {names or 'quantised'}; "
            "choose a dtype that it supports."
        )
