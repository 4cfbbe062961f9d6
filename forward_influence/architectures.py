"""Models that this measurement would get wrong, known by their configuration before weights load.

What is removed here is a key and a value of one position. A model whose memory is a running state has
no such thing; one that adds a position bias to the scores, or sees the future, breaks the masked
reference. Models that are not named here pass the reference check after loading.
"""

from __future__ import annotations

from forward_influence.errors import UserError

_STATE = "keeps a running state (linear attention, convolution or state space), not a key and value per token"
_ALIBI = "adds a position bias to the attention scores (ALiBi or relative)"
_LATENT = "caches latent vectors (multi-head latent attention), not keys and values"
_BIDIRECTIONAL = "is not a causal language model"
_SEQ2SEQ = "is an encoder-decoder"
_MULTIMODAL = "takes more than text"
_SELECTS = "chooses the keys of each query itself (sparse, chunked or compressed attention)"
_SINKS = "adds learned attention sinks to the softmax"
_OWN_ATTENTION = "computes attention in code of its own, which takes no other attention function"
_WINDOW_IN_MASK = "has a sliding window in its mask alone, of which its layers say nothing"
_SHARES = "shares keys and values between layers"


def _types(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


#: model_type, or a GGUF file's architecture -> why it is refused.
REFUSED_TYPES = {
    **_types(
        _STATE,
        """arwkv7 bailing_hybrid bamba falcon-h1 falcon_h1 falcon_mamba granitehybrid granitemoehybrid inkling
        inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model inkling_text jamba kimi-linear
        kimi_linear lara_mini lfm2 lfm2_moe lfm2moe lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid plamo2
        qwen35 qwen35moe qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen3next qwen4_exp
        qwen4_exp_text recurrent_gemma retnet rwkv rwkv6 rwkv6qwen2 rwkv7 xlstm zamba zamba2 zaya""",
    ),
    **_types(_ALIBI, "baichuan bloom mpt xlm xlnet"),
    **_types(
        _LATENT,
        """axk1 axk2 deepseek2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 glm4_moe_lite glm_moe_dsa
        longcat_flash minicpm3 sarvam_mla youtu""",
    ),
    **_types(
        _BIDIRECTIONAL,
        """albert bert bert-generation big_bird camembert data2vec-text deberta deberta-v2 distilbert electra
        ernie jina-bert-v2 megatron-bert modernbert mpnet nomic-bert nomic_bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod""",
    ),
    **_types(
        _SEQ2SEQ,
        """bart bigbird_pegasus blenderbot blenderbot-small fsmt led longt5 m2m_100 marian mbart mt5 mvp
        pegasus pegasus_x plbart prophetnet seamless_m4t switch_transformers t5 t5encoder t5gemma trocr umt5
        whisper""",
    ),
    **_types(_SELECTS, "cpmant doge llama4 llama4_text reformer"),
    **_types(_SINKS, "flint gpt-oss gpt_oss granite_swa granitemoe_swa mimo_v2_flash"),
    **_types(_OWN_ATTENTION, "falcon gpt_neo gpt_neox_japanese openai-gpt xglm"),
    "blt": "works on bytes and patches, not on tokens",
    "diffllama": "subtracts two attentions over halves of the values (differential attention)",
    "gemma3n_text": "keeps several streams of states per layer (AltUp)",
    "hrm_text": "runs its layers several times for each token",
    "opt": "counts its learned positions by the attention mask",
}

_STATE_KEYS = (
    "mamba_d_state",
    "mamba_d_conv",
    "ssm_cfg",
    "ssm_state_size",
    "linear_conv_kernel_dim",
    "conv_L_cache",
)
#: Types whose window only the mask knows, and the key that switches it on.
_MASK_WINDOWS = {"phimoe": "sliding_window", "qwen2_moe": "use_sliding_window"}
_MULTIMODAL_KEYS = ("vision_config", "audio_config", "text_config", "speech_config", "thinker_config")
_LAYERS_ALLOWED = {"full_attention", "sliding_attention"}


def refuse_unsupported(config: dict, label: str) -> None:
    """Refuse a configuration that is known to be measured wrongly.

    Parameters
    ----------
    config : dict
        The contents of ``config.json``, or a configuration's ``to_dict()``.
    label : str
        How the user named the model.

    Raises
    ------
    UserError
        One sentence with the model's type and the reason.
    """
    if reason := _reason(config):
        kind = config.get("model_type") or "unknown"
        raise UserError(
            f"model {label!r} (type {kind!r}) {reason}, which Forward Influence cannot measure; "
            "choose a decoder-only text model with full or sliding-window attention, such as smollm2-135m."
        )


def _reason(config: dict) -> str | None:
    kind = config.get("model_type") or ""
    if kind in REFUSED_TYPES:
        return REFUSED_TYPES[kind]
    if config.get("is_encoder_decoder"):
        return _SEQ2SEQ
    if any(config.get(key) for key in _MULTIMODAL_KEYS):
        return _MULTIMODAL
    if config.get("alibi") or "alibi" in str(config.get("position_embedding_type", "")).lower():
        return _ALIBI
    if str(config.get("position_embedding_type", "")).startswith("relative"):
        return _ALIBI
    if config.get("kv_lora_rank"):
        return _LATENT
    if any(config.get(key) for key in _STATE_KEYS):
        return _STATE
    if config.get("num_kv_shared_layers"):
        return _SHARES
    if kind in _MASK_WINDOWS and config.get(_MASK_WINDOWS[kind]):
        return _WINDOW_IN_MASK
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return _BIDIRECTIONAL
    return _layer_reason(config) or _head_reason(config.get("architectures"))


def _layer_reason(config: dict) -> str | None:
    layers = set(config.get("layer_types") or config.get("layers_block_type") or ()) - _LAYERS_ALLOWED
    if not layers:
        return None
    if any("attention" in layer and "linear" not in layer for layer in layers):
        return f"has layers of type {', '.join(sorted(layers))}, so it {_SELECTS}"
    return f"has layers of type {', '.join(sorted(layers))}, so it {_STATE}"


def _head_reason(architectures: list[str] | None) -> str | None:
    if not architectures or any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return None
    return f"holds a {architectures[0]}, so it {_BIDIRECTIONAL}"
