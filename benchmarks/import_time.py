"""`import paceline` against `import json`, each in a fresh interpreter, and that it loads no third-party module."""

from __future__ import annotations

import subprocess
import sys
import time

from common import in_turn, median, report

ROUNDS = 30


def start(code: str) -> float:
    before = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - before) * 1000


LOADED = """
import sys
before = set(sys.modules)
import paceline
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(" ".join(sorted(name for name in new if name not in sys.stdlib_module_names and name != "paceline")))
"""


def main() -> None:
    ours, theirs = in_turn(ROUNDS, lambda: start("import paceline"), lambda: start("import json"))
    foreign = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout.split()
    more = median(ours) - median(theirs)
    report(
        "import_time",
        "import paceline over import json",
        "at most 40 ms more, no third-party module",
        more <= 40 and not foreign,
        ours_ms=median(ours),
        json_ms=median(theirs),
        more_ms=more,
        third_party_modules=foreign,
    )


if __name__ == "__main__":
    main()
