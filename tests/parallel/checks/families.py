"""Models of Hugging Face's transformers, with the defaults of their configurations, on every layout; see `kinds`."""

from __future__ import annotations

from tests.parallel.checks.kinds import assert_right
from tests.parallel.kinds.families import FAMILIES
from tests.parallel.world import Ranks

SIZES = (2, 4)

#: Layout -> the families of `make test`.
SHORT = {
    "data": ("gemma2", "lora", "llama-own-loss"),
    "shard": ("gpt2-checkpointed", "mixtral"),
    "pipe": ("gpt2", "llama", "t5", "mixtral", "qwen2", "bert-own-loss", "lora"),
    "tensor": ("gpt2", "whisper"),
    "data@pipe": ("mistral",),
}


def check_models_of_transformers(ranks: Ranks) -> None:
    assert_right(ranks, FAMILIES, SHORT)


def check_all_models_of_transformers(ranks: Ranks) -> None:
    assert_right(ranks, FAMILIES)
