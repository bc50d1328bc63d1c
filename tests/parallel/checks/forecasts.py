"""What "auto" takes, and what `explain` tells of every layout."""

from __future__ import annotations

import paceline
from paceline.parallel import FullyShard, PipelineParallel
from tests.parallel.equality import adamw, batches
from tests.parallel.models import CASES, Transformer
from tests.parallel.world import Ranks

import torch  # isort: skip

SIZES = (2,)


def check_auto_strategy_forecasts_every_layout_and_chooses_one(ranks: Ranks) -> None:
    case = CASES["transformer_untied"]
    given = batches(case, torch.float32, (8,))
    names = {"DataParallel(2)", "FullyShard(2)", "PipelineParallel(2)", "TensorParallel(2)"}
    # `make test` leaves out "auto" without a limit, because the programs of `test_launchers` use it.
    every = (("auto", None), (FullyShard(), None), ("auto", 3_800_000), (PipelineParallel(), None))
    for strategy, memory in ranks.cells(every[1:3], every):
        model = Transformer(tied=False, width=64)
        par = paceline.parallelize(
            model,
            adamw(model),
            given,
            loss=case.loss,
            strategy=strategy,
            microbatches=2,
            memory_bytes=memory if strategy == "auto" else None,
        )
        before = [(buffer, buffer.clone()) for buffer in par.module.buffers()]
        par.step(given[0])
        text = par.explain()
        assert set(text.forecasts) == names
        used = text.forecasts[text.chosen]
        held = sum(param.numel() * param.element_size() for param in model.parameters() if not param.is_meta)
        assert used.memory_bytes > 0
        assert f"*  {text.chosen}" in text
        if strategy == "auto":
            fits = {
                name: one
                for name, one in text.forecasts.items()
                if "Tensor" not in name and one.memory_bytes <= par.limit_bytes
            }
            assert used.step_s <= 1.05 * min(one.step_s for one in fits.values())
            assert "is forecast to take" in text
            # DataParallel does not fit into the limit: it needs weights, gradients and two moments of 52,000 numbers each.
            assert memory is None or text.chosen != "DataParallel(2)"
            told: list[str] = [""] * 2
            torch.distributed.all_gather_object(told, text.chosen)
            assert told == [text.chosen] * 2
        if isinstance(strategy, FullyShard):
            # The rank holds as many parameter bytes as the forecast says.
            own = sum(param.to_local().nbytes for param in par.module.parameters())  # type: ignore[attr-defined]
            assert abs(own - used.parameter_bytes) < 0.02 * own
            assert held
        # Measuring must not change the model.
        assert all(torch.equal(buffer, value) for buffer, value in before)
        assert par.explain().forecasts == text.forecasts
