"""Many small objects at once, from one thread: the waiting is obstore's, in Rust.

With threads that wait, 2,000 objects cost twice the processor time, most of it in the kernel. Only what goes well
at the first try ends here; everything else is left to the threads of `transfer`, which know how to go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paceline.data.transfer.file_to_fetch import FileToFetch
from paceline.data.transfer.partial import Partial, claim
from paceline.data.transfer.progress import Meter

if TYPE_CHECKING:
    from paceline.data.transfer.reading import ObjectReader

#: Larger ones are streamed, and resumed where they break off.
SMALL_BYTES = 1 << 20
_AT_ONCE = 32


def fetch_small(reader: ObjectReader, jobs: Sequence[FileToFetch], meter: Meter, left: list[FileToFetch]) -> int:
    """Fetch a batch and return how many bytes came.

    left: gets the jobs that are still to be done: those that failed in any way, that another process is fetching, or of
        which something has come before.
    """
    return asyncio.run(_fetch(reader, iter(jobs), meter, left))


async def _fetch(reader: ObjectReader, jobs: Iterator[FileToFetch], meter: Meter, left: list[FileToFetch]) -> int:
    counts = await asyncio.gather(*[_take(reader, jobs, meter, left) for _ in range(_AT_ONCE)])
    return sum(counts)


async def _take(reader: ObjectReader, waiting: Iterator[FileToFetch], meter: Meter, left: list[FileToFetch]) -> int:
    """Fetch one after the other, as long as there are any and none has failed."""
    fetched = 0
    # All 32 take from one iterator: they run in one thread, and change only where they wait for a download.
    for job in waiting:
        # After a failure the threads try again, slower; they also find out what is wrong.
        if left:
            left.append(job)
            continue
        # Never waits for another process's lock: this thread has all the other downloads to go on with.
        try:
            partial = claim(job.part, job.size, wait=False)
        except OSError:
            partial = None
        if partial is None or partial.done_bytes:
            if partial is not None:
                partial.close()
            left.append(job)
            continue
        try:
            fetched += await _one(reader, job, partial, meter)
        except Exception:
            left.append(job)
        finally:
            partial.close()
    return fetched


async def _one(reader: ObjectReader, job: FileToFetch, partial: Partial, meter: Meter) -> int:
    if job.is_there():
        with contextlib.suppress(OSError):
            partial.discard()
        meter.add(job.size, files=1)
        return 0
    data: Any = await reader.get_whole(job.path, job.size, job.version)
    partial.write(data, 0)
    job.place(partial)
    meter.add(job.size, files=1)
    return job.size
