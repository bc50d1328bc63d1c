"""Train, within a memory limit, a model that this rank could not hold.

    RANK=0 WORLD_SIZE=4 ... python limited.py <folder> <strategy> <width> <blocks> <MiB> [<folder of weights>]

The kernel enforces the limit (RLIMIT_DATA): it counts all private memory that the process could write to, used or not. The
limit is <MiB> above what the process has once everything is imported, so it is the same for every build of torch.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
MIB = 2**20


def status(key: str) -> int:
    """Bytes, of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main(folder: str, strategy: str, width: str, blocks: str, margin_mib: str, weights: str | None = None) -> None:
    sys.path.insert(0, str(ROOT))
    import torch

    import paceline
    from paceline.parallel import empty, mesh
    from tests.parallel.models import CASES, Transformer

    torch.set_num_threads(1)
    place = mesh.start()
    case = CASES["transformer_untied"]
    torch.manual_seed(0)
    given = [case.batch(8) for _ in range(2)]

    def parallel(width: int, blocks: int, weights: str | None) -> paceline.parallel.Parallel:
        with empty():
            model = Transformer(tied=False, width=width, depth=blocks)
        return paceline.parallelize(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-4),
            given,
            loss=case.loss,
            strategy=getattr(paceline.parallel, strategy)(),
            microbatches=4 if strategy == "PipelineParallel" else 1,
            weights=weights,
        )

    # The first step loads parts of torch, which belong to the program and not to the model.
    parallel(16, 5, None).step(given[0])
    # Collect the garbage of the first step now, and not during the measurement.
    gc.collect()
    base = status("VmRSS")
    limit = status("VmData") + int(margin_mib) * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")
    par = parallel(int(width), int(blocks), weights)
    losses = [float(par.step(batch)) for batch in given]
    peak = status("VmHWM")
    whole = par.skeleton.bytes
    text = par.explain()
    assert text.forecasts, text
    after = None
    if weights is None:
        after = float(par.evaluate([given[0]], case.loss))
        par.save_safetensors(Path(folder) / "weights")
    report = {
        "losses": losses,
        "after": after,
        "base": base,
        "peak": peak,
        "peak_with_saving": status("VmHWM"),
        "whole": whole,
        "explain": text,
        "planned": int(text.forecasts[text.chosen].memory_bytes),
    }
    (Path(folder) / f"{strategy}_{place.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
