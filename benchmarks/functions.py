"""A function submitted on this machine: its result back, and 1,000 calls by `map` against submitit's local executor.

submitit is in an environment of its own: python -m venv peers; peers/bin/pip install submitit. Its local executor starts two
processes for each job, all at once, for which 1,000 jobs need more memory than many machines have. So submitit gets its jobs in
waves of 8, each by `map_array`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time

from common import in_turn, median, report, scratch

CALLS = 1000
ROUNDS = 1
RESULTS = 11
MODULE = """
import paceline

@paceline.job
def double(x):
    return 2 * x
"""
THEIRS = """
import json, sys, time
import submitit
from plain import double

count, wave = int(sys.argv[1]), int(sys.argv[2])
before = time.perf_counter()
executor, results = submitit.LocalExecutor(folder="logs"), []
for begin in range(0, count, wave):
    jobs = executor.map_array(double, range(begin, min(begin + wave, count)))
    results += [job.result() for job in jobs]
assert results == [2 * x for x in range(count)]
print(json.dumps(time.perf_counter() - before))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", required=True, help="interpreter of an environment that has submitit")
    parser.add_argument("--wave", type=int, default=8)
    parser.add_argument(
        "--peer-calls", type=int, default=CALLS, help="jobs of submitit, whose time counts as for 1,000"
    )
    given = parser.parse_args()
    peer = os.path.abspath(given.peer_python)
    sys.argv[sys.argv.index("--peer-python") + 1] = os.path.basename(peer)
    with scratch() as folder:
        (folder / "source").mkdir()
        (folder / "source" / "doubled.py").write_text(MODULE)
        (folder / "plain.py").write_text("def double(x):\n    return 2 * x\n")
        (folder / "theirs.py").write_text(THEIRS)
        sys.path.insert(0, str(folder / "source"))
        doubled = importlib.import_module("doubled")

        def one_s() -> float:
            before = time.perf_counter()
            assert doubled.double.submit(4).result() == 8
            return time.perf_counter() - before

        def ours_s() -> float:
            before = time.perf_counter()
            assert doubled.double.map(range(CALLS)).results() == [2 * x for x in range(CALLS)]
            return time.perf_counter() - before

        def theirs_s() -> float:
            words = [peer, "theirs.py", str(given.peer_calls), str(given.wave)]
            done = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True)
            return float(json.loads(done.stdout)) * CALLS / given.peer_calls

        (results,) = in_turn(RESULTS, one_s)
        taken = median(results)
        report(
            "function_result",
            "function submitted on this machine, result back",
            "at most 0.4 s",
            taken <= 0.4,
            ours_s=taken,
            rounds=RESULTS,
        )
        # Without a first round that does not count: submitit takes minutes, of which its imports are a small part.
        mine, others = ([figure() for _ in range(ROUNDS)] for figure in (ours_s, theirs_s))
    ratio = median([b / a for a, b in zip(mine, others, strict=True)])
    report(
        "function_map",
        f"map over {CALLS:,} calls on this machine, against submitit's local executor",
        "at least 5 times as fast",
        ratio >= 5,
        ours_s=median(mine),
        submitit_s=median(others),
        times=ratio,
        submitit_calls=given.peer_calls,
        wave=given.wave,
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    main()
