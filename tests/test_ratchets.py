"""Ceilings that can only fall: the size of the source, its types and branches, and its English.

Run `python -m tests.test_ratchets` for the numbers of today, `python -m tests.test_ratchets src/paceline/runs` for those of a
folder, and add `--marks` for each mark of stilted English with its place. A change that lowers a number lowers its ceiling.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"

CEILINGS = {
    "lines": 141_070,
    "files": 837,
    "percent of lines that import": 6.5,
    "Any per 1,000 lines": 25.3,
    "dict[str, Any] per 1,000 lines": 4.3,
    "if per 1,000 lines": 101.7,
    "words in a first docstring line": 11.3,
    "marks in docstrings and comments": 1.4,
    "marks in docs": 6.9,
    "marks in the command line's help": 0.0,
    "marks in error texts": 4.4,
    "marks in the page": 5.7,
}

#: Patterns of English that a reader has to read twice (`STYLE`: subjects and nouns are named, somebody acts, words are common).
#: Widely read Python packages have 0.4 to 1.4 of these marks in 1,000 words.
MARKS = {
    "a relative clause instead of a noun": (
        r"\b(?:whoever|whatever)\b"
        r"|(?<![\w'-])what (?:it|they|he|she|is|are|was|were|has|have|had|can|may|must|does|do|needs?|\w+s|\w+ed)\b"
        r"|(?:^|[.,;:(] |\b(?:of|to|by|for|than|as|and|or|but) )who (?:is|are|was|has|have|had|\w+s)\b"
    ),
    "a passive that hides who acts": (
        r"\b(?:is|are|was|were|be|been|being) (?:told|had|asked|given back|taken (?:for|up|from|as|in|over|away|back)|said|let"
        r"|looked (?:at|up|for|after)|waited for|spoken|held to|meant|known of|gone by|passed over|noticed)\b"
    ),
    "an old or literary word": (
        r"\b(?:whom|anew|nobody|lest|whence|thereof|therein|hence|wherever|whither|no more|all the same|(?:at|in) one go"
        r"|for ever|be it|to be had|(?:by|of) itself|by chance|nought|afresh)\b"
    ),
    "a pronoun in the place of a noun": (
        r"\b(?:is|are|has|have|was|were|had|as|be|for|of|gives?|knows?|needs?|takes?) (?:none|one)(?=[.,;:)\n]|$)"
        r"|\b(?:is|are|has) none\b"
    ),
    "a place instead of a state": (
        r"\bas (?:it|they) (?:is|are|was|were|stands?|lies?)\b|\bwhere (?:it|they) (?:is|are|lies?|stands?|was|were)\b"
        r"|\b(?:lies|lie|lay|stands|stand|stood) (?:in|on|at|there|below|above|before|behind|where)\b"
    ),
}
_MARK = re.compile("|".join(MARKS.values()), re.IGNORECASE | re.MULTILINE)
_WORD = re.compile(r"[A-Za-z][\w'-]*")
