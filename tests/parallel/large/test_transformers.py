"""Hugging Face's models are built without values, and `from_pretrained` loads the saved files."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline import parallel
from paceline.parallel import DataParallel
from tests.late import late

torch = late("torch")


def test_gpt2_built_empty_is_initialized_as_by_transformers_and_each_loads_weights_of_the_other(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=200, n_positions=32)
    with parallel.empty():
        model = transformers.GPT2LMHeadModel(config)
    assert model.transformer.wte.weight.is_meta
    par = paceline.parallelize(model, loss=lambda output, target: output.logits.mean(), strategy=DataParallel())
    values = par.full_state_dict()
    # GPT-2 first fills all modules, and then scales the projections into its residual stream: 0.02 / sqrt(2 * 4).
    assert abs(values["transformer.h.1.mlp.c_proj.weight"].std().item() - 0.00707) < 0.0004
    assert abs(values["transformer.h.1.mlp.c_fc.weight"].std().item() - 0.02) < 0.001
    par.save_safetensors(tmp_path / "saved")
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, values[name]) for name, value in back.state_dict().items())
    back.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    with parallel.empty():
        model = transformers.GPT2LMHeadModel(config)
    again = paceline.parallelize(
        model,
        loss=lambda output, target: output.logits.mean(),
        strategy=DataParallel(),
        weights=tmp_path / "theirs",
    )
    assert all(torch.equal(value, values[name]) for name, value in again.full_state_dict().items())
