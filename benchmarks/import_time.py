"""`import paceline` against `import json`, each in a fresh interpreter, and that it loads no third-party module; and
`paceline --version` against a Python that does nothing."""

from __future__ import annotations

import subprocess
import sys
import time

from common import in_turn, median, program, report

ROUNDS = 30


def start(code: str) -> float:
    return timed([sys.executable, "-c", code])


def timed(command: list[str]) -> float:
    """Milliseconds from the start of `command` to its end."""
    before = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
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
    version = [program("paceline"), "--version"]
    ours, theirs = in_turn(ROUNDS, lambda: timed(version), lambda: start("pass"))
    more = median(ours) - median(theirs)
    report(
        "version_time",
        "paceline --version over python -c pass",
        "at most 80 ms more",
        more <= 80,
        ours_ms=median(ours),
        python_ms=median(theirs),
        more_ms=more,
    )


if __name__ == "__main__":
    main()
