"""Output as a page shows it, compared with the real output."""

from __future__ import annotations

import re

from paceline.runs import states


def assert_printed(said: list[str], printed: str) -> None:
    """Raise AssertionError unless each line of `said` was printed.

    Numbers, ids, runs' readable names, fingerprints and the width of columns may differ, "..." stands for anything, a state may
    be too short to be seen. Words may not.
    """
    lines = [_narrow(line) for line in printed.splitlines()]
    for line in map(_narrow, said):
        if line in ("", "...") or re.fullmatch(rf"(-- )?({'|'.join(states.ALL)})", line):
            continue
        pattern = as_pattern(line)
        if lost := re.match(r"(rank \d+) (?:lost its connection|failed after it)", line):
            # On a busy machine, Paceline may end this rank before the rank fails by itself, so also accept the message for that.
            pattern += f"|{lost[1]} was ended by Paceline because of it\\."
        assert any(re.fullmatch(pattern, other) for other in lines), f"{line!r} is not in:\n{printed}"


def _narrow(line: str) -> str:
    return re.sub(r" {2,}", "  ", line.strip())


def as_pattern(line: str) -> str:
    parts = []
    # Ignore fingerprints, because they come from numpy's files, whose headers depend on the version of Python's zipfile.
    sizes = r"\d[\d.,]* [KMG]iB|\d[\d.,]*(?:e[+-]\d+)?"
    for word in re.split(
        rf"(\.\.\.|\b[a-z]+-[a-z]+-\d+(?= \()|_\d{{10}}_[0-9a-f]{{8}}|(?<=fingerprint )[0-9a-f]{{8}}|(?<= in )[\d.]+ s|{sizes})",
        line,
    ):
        if word == "...":
            parts.append(".*")
        elif "fingerprint" in line and re.fullmatch(r"[0-9a-f]{8}", word):
            parts.append("[0-9a-f]{8}")
        elif re.fullmatch(r"[a-z]+-[a-z]+-\d+", word):
            parts.append(r"[a-z]+-[a-z]+-\d+")
        elif re.fullmatch(r"_\d{10}_[0-9a-f]{8}", word):
            parts.append(r"_\d{10}_[0-9a-f]{8}")
        elif re.fullmatch(r"[\d.]+ s", word):
            parts.append(r"[\d.]+ (s|min \d+ s)")
        elif word.endswith("iB"):
            parts.append(r"\d[\d.,]* [KMG]?i?B")
        elif word[:1].isdigit():
            parts.append(r"\d[\d.,]*(e[+-]\d+)?")
        else:
            parts.append(re.escape(word))
    return "".join(parts)
