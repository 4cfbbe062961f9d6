"""Tiny random models of many architectures, and the naive reference that everything is compared with."""

from __future__ import annotations

import math

import torch

VOCABULARY = 89
_COMMON = dict(
    vocab_size=VOCABULARY,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    initializer_range=0.035,
)


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM, LlamaConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, **_COMMON)  # fmt: skip


def _qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM, Qwen2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, **_COMMON)  # fmt: skip


def _qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM, Qwen3Config(
        hidden_size=40, intermediate_size=64, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=12, **_COMMON)  # fmt: skip


def _mistral():
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM, MistralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, **_COMMON)  # fmt: skip


def _gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM, Gemma2Config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, query_pre_attn_scalar=2,
        attn_logit_softcapping=8.0, final_logit_softcapping=8.0, **_COMMON)  # fmt: skip


def _gemma3():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM, Gemma3TextConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, sliding_window=8, query_pre_attn_scalar=1,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        **_COMMON)  # fmt: skip


def _phi3(**extra):
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM, Phi3Config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=3, **{**_COMMON, **extra})  # fmt: skip


def _phi3_longrope():
    factors = [1.0 + 0.5 * i for i in range(4)]
    return _phi3(
        original_max_position_embeddings=32,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": factors,
            "factor": 8.0, "original_max_position_embeddings": 32,
        },
    )  # fmt: skip


def _llama_dynamic():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {**_COMMON, "max_position_embeddings": 32}
    return LlamaForCausalLM, LlamaConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0,
                         "original_max_position_embeddings": 32}, **config)  # fmt: skip


def _granite():
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM, GraniteConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        logits_scaling=4.0, attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.5,
        **_COMMON)  # fmt: skip


ARCHITECTURES = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "phi3_longrope": _phi3_longrope,
    "llama_dynamic": _llama_dynamic,
    "granite": _granite,
}


def build(name: str, seed: int = 0):
    """A model with amplified matrices: random weights of the usual size attend almost uniformly, which hides faults.

    Norms stay as they are, but for Qwen 3's query and key norms, which would undo the amplification.
    """
    model_class, config = ARCHITECTURES[name]()
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
            elif name == "qwen3" and ("q_norm" in label or "k_norm" in label):
                parameter.mul_(2)
    return model


def random_ids(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, length), generator=generator)


def layer_windows(config) -> list[int | None]:
    """Sliding window of each layer, read from the configuration alone."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def reference_logits(model, ids: torch.Tensor, removed=None, prefix: int = 0) -> torch.Tensor:
    """One float64 forward over the whole text; rows at or after ``prefix`` do not see the removed columns.

    ``removed`` is bool ``[layers or 1, kv_heads or 1, prefix]``. Returns ``[tokens, vocabulary]``.
    """
    if removed is None:
        return masked_logits(model, ids, [])
    layers = model.config.num_hidden_layers
    cuts = [(prefix, [~removed[index if removed.shape[0] > 1 else 0] for index in range(layers)])]
    return masked_logits(model, ids, cuts)


def masked_logits(model, ids: torch.Tensor, cuts: list) -> torch.Tensor:
    """One float64 forward over the whole text ``[1, tokens]``, in which positions disappear as it goes on.

    ``cuts`` holds pairs: a position, and for each layer bool ``[kv_heads or 1, positions before it]`` that says what
    queries from there on still see. Uses transformers' eager attention, with a mask made here for each layer and
    head, and nothing of the code under test. Returns ``[tokens, vocabulary]``.
    """
    import copy

    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    config = model.config
    length = ids.shape[1]
    heads = config.num_attention_heads
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    attentions = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]
    for module, window in zip(attentions, layer_windows(config), strict=True):
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        seen = seen[None].repeat(heads, 1, 1)
        for start, kept in cuts:
            flags = kept[module.layer_idx]
            flags = flags.repeat_interleave(heads // flags.shape[0], 0)
            seen[:, start:, : flags.shape[-1]] &= flags[:, None]
        seen |= distance == 0  # also a position that nobody else sees any more
        mask = torch.zeros(1, heads, length, length, dtype=torch.float64).masked_fill(~seen, float("-inf"))

        def put_mask(module, args, kwargs, mask=mask):
            kwargs["attention_mask"] = mask
            return args, kwargs

        module.register_forward_pre_hook(put_mask, with_kwargs=True)
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0]


def attention_entropy_share(model, ids: torch.Tensor) -> float:
    """Mean entropy of attention rows over that of uniform rows (rows that see one key left out)."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, use_cache=False, output_attentions=True).attentions
    model.set_attn_implementation(usual)
    shares = []
    for layer in attentions:
        visible = (layer > 0).sum(-1)
        entropy = torch.special.entr(layer).sum(-1)
        many = visible > 1
        shares.append((entropy[many] / visible[many].float().log()).mean().item())
    return math.fsum(shares) / len(shares)
