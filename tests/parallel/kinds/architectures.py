"""Architectures of transformers, each by a small configuration that one table makes. Imports transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.parallel.kinds.families import WORDS, classes, count, images, next_words, words
from tests.parallel.kinds.kind import EQUAL, Kind
from tests.parallel.kinds.published import UNITS

#: Small sizes, under each name that a configuration of transformers uses for them.
SIZES = (
    dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "moe_intermediate_size", "emb_dim"), 32)
    | dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 64
    )
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2)
    | dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        4,
    )
    | dict.fromkeys(
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "state_size", "rotary_dim"), 4
    )
    | dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "moe_k", "type_vocab_size"), 2)
    | dict.fromkeys(("head_dim", "d_kv"), 8)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "word_embed_proj_dim"), 32)
    | dict.fromkeys(("vocab_size", "decoder_vocab_size"), WORDS)
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "num_labels": 3}
    # A wide initial range, because numbers near 0 would hide a layer that is left out.
    | {"initializer_range": 0.2, "image_size": 16, "patch_size": 4, "use_cache": False}
)


def small(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of this class without dropout, as small as its configuration lets it be."""

    def make() -> nn.Module:
        kind = getattr(transformers, name)
        usual = vars(kind.config_class())
        given = {size: value for size, value in SIZES.items() if size in usual or size == "num_labels"}
        given |= {rate: 0.0 for rate, value in usual.items() if isinstance(value, float) and "drop" in rate}
        settings = kind.config_class(**(given | options))
        # Use the eager implementation, because the default implementations of expert layers compute in float32.
        settings._experts_implementation = "eager"
        model: nn.Module = kind(settings)
        return model.train()

    return make


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def classified(rows: int) -> dict[str, Tensor]:
    batch = words(rows)
    batch["input_ids"][:, 4] = 2
    return batch | {"labels": torch.randint(0, 3, (rows,))}


def decoder(name: str, *, limit: float = EQUAL, refused: Any = None, **options: Any) -> Kind:
    make = small(f"{name}ForCausalLM", **options)
    return Kind(
        make=make, batch=words, loss=next_words, loss_weight=count, optimizer=sgd, limit=limit, refused=refused or {}
    )


def encoder(name: str, *, limit: float = EQUAL, refused: Any = None, **options: Any) -> Kind:
    make = small(f"{name}ForSequenceClassification", **options)
    return Kind(make=make, batch=classified, loss=classes, optimizer=sgd, limit=limit, refused=refused or {})


def pictures(name: str, *, limit: float = EQUAL, refused: Any = None, batch: Any = images, **options: Any) -> Kind:
    make = small(f"{name}ForImageClassification", **options)
    return Kind(make=make, batch=batch, loss=classes, optimizer=sgd, limit=limit, refused=refused or {})


DECODERS = (
    *("Apertus", "Arcee", "AriaText", "BigBird", "BioGpt", "BitNet", "Blenderbot", "Clvp", "CodeGen"),
    *("Cohere", "Cohere2", "DiffLlama", "Doge", "Emu3", "Ernie4_5", "Ernie4_5_Moe", "Exaone4"),
    *("FalconMamba", "FlexOlmo", "GPTBigCode", "GPTJ", "GPTNeoXJapanese", "Gemma", "Gemma3", "Glm"),
    *("Glm4", "Glm4Moe", "GptOss", "Granite", "GraniteMoe", "GraniteMoeShared", "Helium"),
    *("HunYuanDenseV1", "HunYuanMoEV1", "Jais2", "JetMoe", "Lfm2", "Llama4", "MBart", "Marian"),
    *("MiniMax", "MiniMaxM2", "Ministral", "Mllama", "ModernBertDecoder", "Moshi", "Mpt", "NanoChat"),
    *("Nemotron", "Olmo", "Olmo2", "OlmoHybrid", "Olmoe", "Pegasus", "Persimmon", "Phi3", "Phimoe"),
    *("RemBert", "RoFormer", "Rwkv", "SmolLM3", "StableLm", "Starcoder2", "TrOCR", "Whisper"),
    *("XLMRobertaXL",),
)
ENCODERS = (
    *("Albert", "BigBirdPegasus", "ConvBert", "Deberta", "DebertaV2", "Electra", "Esm", "EuroBert"),
    *("FNet", "Flaubert", "GPT2", "Gte", "IBert", "Longformer", "MPNet", "MT5", "MegatronBert"),
    *("MobileBert", "ModernBert", "NomicBert", "Nystromformer", "OpenAIGPT", "RobertaPreLayerNorm"),
    *("SqueezeBert", "Tapas", "UMT5", "XLM", "Yoso"),
)
PICTURES = ("Beit", "Data2VecVision", "DeiT", "Dinov2", "Dinov2WithRegisters", "IJepa", "ViTMSN")

#: Class -> options that it needs in addition to the sizes.
OPTIONS: dict[str, dict[str, Any]] = {
    # With so few positions, BigBird would replace its own attention layers in the first call.
    "BigBird": {"attention_type": "original_full"},
    # These models compute some values in float32, so their allowed difference is larger.
    "FalconMamba": {"limit": 1e-6},
    "Moshi": {"limit": 1e-6},
    # ModernBERT iterates over the set of its layer types, whose order differs between processes. One type avoids that.
    "ModernBertDecoder": {"layer_types": ["full_attention"] * 2},
    "ModernBert": {"layer_types": ["full_attention"] * 2},
    "Phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    # The buffers of I-BERT are the smallest and the largest number in the rows of a batch.
    "IBert": {"refused": dict.fromkeys(("data", "shard"), "buffers are not those .* from the rows of a batch")},
    # SqueezeBERT calls `layer.forward(...)`, which bypasses the hooks of FSDP2.
    "SqueezeBert": {"refused": {"shard": UNITS}},
    **{
        name: {"refused": {"pipe": "unique_consecutive.*depends on a tensor's values"}}
        for name in ("BigBirdPegasus", "MT5", "UMT5")
    },
}

ARCHITECTURES: dict[str, Kind] = (
    {name: decoder(name, **OPTIONS.get(name, {})) for name in DECODERS}
    | {f"{name}-classes": encoder(name, **OPTIONS.get(name, {})) for name in ENCODERS}
    | {name: pictures(name) for name in PICTURES}
)
