"""Small models of Hugging Face's transformers, with default settings except sizes. This module imports transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, nn

from tests.parallel.kinds.kind import EQUAL, Kind

WORDS, LENGTH = 64, 8
#: Small sizes, so that models are quick to train. Most configuration classes of transformers use these option names.
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRY = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def made(
    kind: str, config: str, *, checkpointed: bool = False, experts: str | None = "eager", **options: Any
) -> Callable[[], nn.Module]:
    """Return a maker of models. experts: Their implementation; None for transformers' default, which uses float32 at most."""

    def make() -> nn.Module:
        settings = getattr(transformers, config)(**options)
        if experts is not None:
            settings._experts_implementation = experts
        model: nn.Module = getattr(transformers, kind)(settings)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        return model.train()

    return make


def words(rows: int) -> dict[str, Tensor]:
    """Tokens with padding, and labels with ignored positions."""
    drawn = torch.randint(3, WORDS, (rows, LENGTH))
    mask = torch.ones_like(drawn)
    for row in range(rows):
        mask[row, LENGTH - row % 3 :] = 0
    return {"input_ids": drawn, "attention_mask": mask, "labels": drawn.masked_fill(mask == 0, -100)}


def pairs(rows: int) -> dict[str, Tensor]:
    """Two sentences, for an encoder and a decoder."""
    return words(rows) | {"decoder_input_ids": torch.randint(3, WORDS, (rows, LENGTH))}


def encoded(rows: int) -> Any:
    return transformers.BatchEncoding(words(rows))


def sentences(rows: int) -> dict[str, Tensor]:
    return words(rows) | {"labels": torch.randint(0, 3, (rows,))}


def images(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(0, 3, (rows,))}


def sounds(rows: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(rows, 8, 24),
        "labels": torch.randint(3, WORDS, (rows, LENGTH)),
        "decoder_input_ids": torch.randint(3, WORDS, (rows, LENGTH)),
    }


def next_words(output: Any, labels: Tensor) -> Tensor:
    """Return the loss of a decoder in the model's dtype. The models' own losses are computed in float32."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def same_words(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def classes(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, labels)


def count(labels: Tensor) -> Tensor:
    """Return the number of labels that a decoder predicts. The first label of a row and ignored labels don't count."""
    return (labels[:, 1:] != -100).sum()


def count_all(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


#: Expected refusals of models that do not call torch's attention function, or that compute a bias from the positions.
BY_HAND = {
    "context": "on context 2 the model can't compute the first rows .*, which it can in one process: .*modeling_|mask"
}
#: Expected refusal of models in which a token influences later tokens by other means than attention, such as a recurrence.
IN_ORDER = {"context": r"before the first step.* F\.scaled_dot_product_attention .* let attention alone mix places"}


def decoder(
    kind: str, config: str, *, batch: Any = words, limit: float = EQUAL, refused: Any = None, **options: Any
) -> Kind:
    make = made(kind, config, **(SMALL | options))
    return Kind(make=make, batch=batch, loss=next_words, loss_weight=count, limit=limit, refused=refused or {})


def grouped(kind: str, config: str, **options: Any) -> Kind:
    """Return a mixture of experts in float32, computed by the default kernels of transformers."""
    options |= SMALL | {"num_key_value_heads": 2, "num_experts_per_tok": 2}
    make = made(kind, config, experts=None, **options)
    # Use SGD, because AdamW divides by the gradient's size, so a rounding error of a tiny gradient changes the step as much.
    return Kind(
        make=make, batch=words, loss=next_words, loss_weight=count, optimizer=sgd, limit=1e-5, dtype=torch.float32
    )


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def lora(kind: Callable[[], nn.Module], targets: list[str]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import peft

        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)
        return peft.get_peft_model(kind(), config).train()

    return make


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": WORDS} | {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = SMALL | {"num_key_value_heads": 2}
_T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_T5 |= {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
_BART = {"vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 32}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_BART |= {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1}
_BART |= {"eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
_WHISPER = _BART | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32}
del _WHISPER["max_position_embeddings"], _WHISPER["forced_eos_token_id"]

FAMILIES: dict[str, Kind] = {
    "gpt2": Kind(make=made("GPT2LMHeadModel", "GPT2Config", **GPT2), batch=words, loss=next_words, loss_weight=count),
    "llama": decoder("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, tie_word_embeddings=True),
    "mistral": decoder("MistralForCausalLM", "MistralConfig", num_key_value_heads=2),
    "qwen2": decoder("Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=2, batch=encoded),
    "qwen3": decoder("Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=2, head_dim=8),
    "gemma2": decoder(
        # Gemma 2 computes its normalisation in float32, and also the gradients of the normalisation's weights.
        "Gemma2ForCausalLM",
        "Gemma2Config",
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        limit=1e-6,
        refused=BY_HAND,
    ),
    "phi": decoder(
        "PhiForCausalLM", "PhiConfig", num_key_value_heads=2, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0
    ),
    "bloom": decoder(
        "BloomForCausalLM",
        "BloomConfig",
        n_layer=2,
        n_head=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        refused=BY_HAND,
    ),
    "gpt_neox": decoder("GPTNeoXForCausalLM", "GPTNeoXConfig", **DRY),
    "falcon": decoder("FalconForCausalLM", "FalconConfig", **DRY),
    "opt": decoder(
        "OPTForCausalLM", "OPTConfig", ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0
    ),
    "bart": Kind(
        make=made("BartForConditionalGeneration", "BartConfig", **_BART),
        batch=pairs,
        loss=same_words,
        loss_weight=count_all,
    ),
    "t5": Kind(
        make=made("T5ForConditionalGeneration", "T5Config", **_T5),
        batch=pairs,
        loss=same_words,
        loss_weight=count_all,
        refused=BY_HAND,
    ),
    "mixtral": decoder(
        "MixtralForCausalLM", "MixtralConfig", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ),
    "mixtral-router-loss": Kind(
        # In its first call, Mixtral registers the hooks that collect the outputs of its routers.
        make=made(
            "MixtralForCausalLM",
            "MixtralConfig",
            **SMALL,
            num_key_value_heads=2,
            num_local_experts=4,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
        ),
        batch=words,
        loss=None,
        loss_weight=count,
        limit=1e-6,
        refused=BY_HAND | dict.fromkeys(("data", "shard"), "compares the rows of a batch with one another"),
    ),
    "mixtral-grouped": grouped("MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
    "qwen3-moe-grouped": grouped(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", num_experts=4, moe_intermediate_size=32, head_dim=8
    ),
    "bert": Kind(
        make=made("BertForSequenceClassification", "BertConfig", num_labels=3, **SMALL, **NO_DROPOUT),
        batch=sentences,
        loss=classes,
    ),
    "bert-words": Kind(
        make=made("BertForMaskedLM", "BertConfig", **SMALL, **NO_DROPOUT),
        batch=words,
        loss=same_words,
        loss_weight=count_all,
    ),
    "roberta": Kind(
        make=made("RobertaForSequenceClassification", "RobertaConfig", num_labels=3, **SMALL, **NO_DROPOUT),
        batch=sentences,
        loss=classes,
    ),
    "distilbert": Kind(
        make=made(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            **{"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "num_labels": 3},
            **{"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "max_position_embeddings": 32},
        ),
        batch=sentences,
        loss=classes,
    ),
    "vit": Kind(
        make=made(
            "ViTForImageClassification",
            "ViTConfig",
            **{name: value for name, value in SMALL.items() if name.startswith(("hidden", "inter", "num"))},
            **NO_DROPOUT,
            image_size=16,
            patch_size=4,
            num_labels=3,
        ),
        batch=images,
        loss=classes,
    ),
    "whisper": Kind(
        make=made("WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER),
        batch=sounds,
        loss=same_words,
        loss_weight=count_all,
    ),
    "mamba": Kind(
        make=made(
            "MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4
        ),
        batch=words,
        loss=next_words,
        loss_weight=count,
        limit=1e-6,
        refused=IN_ORDER,
    ),
    "llama-own-loss": Kind(
        make=made("LlamaForCausalLM", "LlamaConfig", **LLAMA), batch=words, loss=None, loss_weight=count, limit=1e-6
    ),
    "bert-own-loss": Kind(
        make=made("BertForSequenceClassification", "BertConfig", num_labels=3, **SMALL, **NO_DROPOUT),
        batch=sentences,
        loss=None,
    ),
    "t5-own-loss": Kind(
        make=made("T5ForConditionalGeneration", "T5Config", **_T5),
        batch=words,
        loss=None,
        loss_weight=count_all,
        limit=1e-6,
        refused=BY_HAND,
    ),
    "gpt2-checkpointed": Kind(
        make=made("GPT2LMHeadModel", "GPT2Config", checkpointed=True, **GPT2),
        batch=words,
        loss=next_words,
        loss_weight=count,
    ),
    "lora": Kind(
        make=lora(made("LlamaForCausalLM", "LlamaConfig", **LLAMA), ["q_proj", "v_proj"]),
        batch=words,
        loss=next_words,
        loss_weight=count,
    ),
    "lora-gpt2": Kind(
        make=lora(made("GPT2LMHeadModel", "GPT2Config", **GPT2), ["c_attn"]),
        batch=words,
        loss=next_words,
        loss_weight=count,
    ),
}
