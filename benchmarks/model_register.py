"""A model of 1 GiB registered, against one pass of SHA-256 over it; and what a second registration takes on the disk.

Every round has a workspace of its own, for the second time a content is hashed alone. The file is in the page cache, and what was
written is on the disk, before each measurement.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import in_turn, median, report, scratch
from paceline.models import registry, sources
from paceline.system.files import tree_size

ROUNDS = 7
SIZE_MIB = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
CHUNK = 1 << 20


def seconds(work: Callable[[], object]) -> float:
    os.sync()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def one_pass(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def main() -> None:
    with scratch() as folder:
        path = folder / "model" / "weights.bin"
        path.parent.mkdir()
        with open(path, "wb") as file:
            for _ in range(SIZE_MIB):
                file.write(os.urandom(CHUNK))
        numbers, grown = itertools.count(), []
        kept: list[Path] = []

        def first() -> float:
            # The last round's is removed here, outside of what is measured.
            for old in kept:
                shutil.rmtree(old)
            kept[:] = [folder / f"workspace-{next(numbers)}"]
            return seconds(lambda: registry.add(kept[0], "model", sources.local(path.parent)))

        def second() -> float:
            before = tree_size(kept[0])
            taken = seconds(lambda: registry.add(kept[0], "model", sources.local(path.parent)))
            grown.append(tree_size(kept[0]) - before)
            return taken

        hashed, new, again = in_turn(ROUNDS, lambda: seconds(lambda: one_pass(path)), first, second)
        times = median([ours / theirs for ours, theirs in zip(new, hashed, strict=True)])
        report(
            "model_register",
            f"registration of {SIZE_MIB / 1024:g} GiB, against one pass of SHA-256; a second time",
            "at most 1.15 times, and under 100 kB",
            times <= 1.15 and max(grown) < 100_000,
            sha256_s=median(hashed),
            register_s=median(new),
            times=times,
            slowest_times=max(ours / theirs for ours, theirs in zip(new, hashed, strict=True)),
            again_s=median(again),
            grown_bytes=max(grown),
            rounds=ROUNDS,
        )


if __name__ == "__main__":
    main()
