"""Models of Hugging Face's transformers, with the defaults of their configurations, on every layout; see `kinds`."""

from __future__ import annotations

from typing import Any

import paceline
from paceline.parallel import TensorParallel
from paceline.parallel.reduce import local
from tests.parallel.checks.kinds import assert_right
from tests.parallel.kinds.architectures import ARCHITECTURES
from tests.parallel.kinds.families import FAMILIES, count, next_words
from tests.parallel.kinds.kind import EQUAL, LAYOUTS, RARE, alone, batches, made, together
from tests.parallel.world import Ranks

SIZES = (2, 4)
#: Layout -> model families that `make proof` tests with this layout.
ON_SOME = {
    "context": [name for name in FAMILIES if not name.startswith("lora")],
    "expert": ("mixtral", "mixtral-router-loss", "mixtral-grouped", "qwen3-moe-grouped"),
    "data@expert": ("mixtral", "mixtral-grouped"),
    "shard@context": ("mixtral",),
}


def check_gpt2_is_split_by_attention_heads_and_equals_one_process(ranks: Ranks) -> None:
    """Its layers keep their weights the other way round, and one of them gives q, k and v."""
    kind = FAMILIES["gpt2"]
    one = alone(kind)
    tables = (
        None,
        # In this plan, some layers are not split in pairs: each gathers its output or splits its input by itself.
        {"*.c_fc": "colwise", "*.0.*.c_attn": "colwise", "*.attn.c_proj": "rowwise"},
    )
    for table in tables:
        many = together(kind, TensorParallel(plan=table))
        assert one.apart(many)[0] <= EQUAL
    model = made(kind)
    par = paceline.parallelize(
        model, None, batches(kind), loss=next_words, loss_weight=count, strategy=TensorParallel()
    )
    text = par.explain()
    assert "colwise: transformer.h.{0..1}.attn.c_attn" in text, text
    assert "transformer.h.{0..1}.attn.c_attn is cut in each of its 3 pieces" in text, text
    held = par.executor.named_parameters()["transformer.h.0.attn.c_attn.weight"]
    assert local(held).shape == (32, 96 // ranks.size)


#: Layout -> model families that `make test` trains with this layout.
SHORT = {
    "data": ("gemma2", "lora", "bert-own-loss"),
    "shard": ("gpt2-checkpointed", "t5"),
    "pipe": ("mixtral-router-loss",),
    # A separate check tests GPT-2 with tensor parallelism.
    "tensor": ("llama",),
    # Whisper is trained with "data@context" on four workers. The checks in context.py test recomputed blocks.
    "context": ("bert", "mamba"),
    "expert": ("mixtral", "mixtral-grouped"),
    "data@context": ("whisper",),
}


def check_transformers_models_equal_one_process_or_are_refused(ranks: Ranks) -> None:
    whole = SHORT | ON_SOME | {name: tuple(FAMILIES) for name in LAYOUTS if name not in RARE}
    assert_right(ranks, FAMILIES, ranks.cells(SHORT, whole))


#: Layout -> further architectures that `make test` trains with this layout.
SHORT_ARCHITECTURES = {
    "data": ("IBert-classes",),
    "shard": ("SqueezeBert-classes",),
    "pipe": ("ModernBertDecoder",),
    "tensor": ("DiffLlama",),
}


def check_further_transformers_architectures_equal_one_process_or_are_refused(ranks: Ranks, sizes: Any = (2,)) -> None:
    whole = {name: tuple(ARCHITECTURES) for name in SHORT_ARCHITECTURES}
    assert_right(ranks, ARCHITECTURES, ranks.cells(SHORT_ARCHITECTURES, whole))
