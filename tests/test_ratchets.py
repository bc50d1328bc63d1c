"""Ceilings that can only fall: the size of the source, its types and branches, and its English.

Run `python -m tests.test_ratchets` for the numbers of today, `python -m tests.test_ratchets src/paceline/runs` for those of a
folder, and add `--marks` for each mark of stilted English with its place. A change that lowers a number lowers its ceiling.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"

#: Feature -> (lines, files) that this feature has added since the limits were lowered. All other code may only shrink.
FEATURES = {
    "daily work on results": (11_893, 50),
    "sessions on a node": (1167, 9),
    "goodput": (850, 6),
    "checkpoints in the background": (1_223, 5),
    "warm spares and replacement": (1_244, 4),
    "types of the JSON": (344, 0),
    "simulated nodes": (1_919, 8),
    # The simulation found these faults: readers that saw different ends of a run, failing disks, and partial copies of
    # the source.
    "findings of simulated worlds": (60, 0),
    # A supervisor or a controller leaves its run if another process has taken over the run. It checks that before each
    # action.
    "one supervisor of a run": (126, 1),
    "kubernetes": (3_829, 18),
    # The Kubernetes objects Deployment and Service, the server behind the Service's port, the program of a pod, and
    # forwarded ports.
    "services on kubernetes": (830, 3),
    "preemptions without a restart": (49, 0),
    "packages that an example lacks": (21, 0),
    "a fair queue": (1_646, 5),
    "wide runs in the fair queue": (63, 0),
    "functions": (1_416, 8),
    "further notifications": (345, 1),
    "backups": (1_389, 7),
    "frozen datasets": (341, 1),
    "parameters and templates": (437, 3),
    "schedules": (1_762, 12),
    "members": (721, 3),
    "relay to W&B": (297, 1),
    # Workers that were killed together are replaced together. Only recent kills for memory on its own node explain the end of
    # a worker.
    "losses at the same time": (72, 0),
    # Two stack dumps show whether a worker waits in a collective for a lost node. Such a worker gets no grace period.
    "workers that wait for lost nodes": (62, 0),
    "lists that wait for curves": (17, 0),
    "a faster page": (54, 0),
    "alerts on metrics": (89, 0),
    "comments on runs": (113, 0),
    "states on the next node": (650, 3),
    "states of par.save in memory": (214, 1),
    # If a worker of `parallelize` is lost, only this worker starts again: the ranks make a new process group, agree on
    # a step, and hand over the state.
    "replaced workers of parallelize": (1_048, 2),
    "temporary folders of killed processes": (53, 1),
    # Corrections after tests with the real cron, with servers of GCS and Azure, and with a real JupyterHub.
    "stores, timers and proxies as tried": (72, 0),
    "schedules of sweeps and pipelines": (105, 2),
}
CEILINGS = {
    "lines": 140_905 + sum(lines for lines, _ in FEATURES.values()),
    "files": 821 + sum(files for _, files in FEATURES.values()),
    "percent of code lines that import": 9.5,
    "Any per 1,000 lines": 8.4,
    "dict[str, Any] per 1,000 lines": 1.8,
    "if per 1,000 code lines": 115.6,
    "words in a first docstring line": 11.2,
    "marks in docstrings and comments": 0.5,
    "marks in docs": 1.0,
    "words in docs": 60_000,
    "marks in the command line's help": 0.0,
    "marks in error texts": 0.2,
    "marks in the page": 0.0,
}

#: Patterns of English that a reader has to read twice (`STYLE`: subjects and nouns are named, somebody acts, words are common).
#: Widely read Python packages have 0.4 to 1.4 matches in 1,000 words.
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


def _python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@lru_cache(maxsize=1)
def _nodes(code: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(code)))


def _docstrings(code: str) -> Iterator[tuple[ast.AST, ast.Expr, str]]:
    for node in _nodes(code):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and isinstance(node.body[0], ast.Expr):
                yield node, node.body[0], text


def prose_of(code: str) -> list[tuple[int, str]]:
    """Return the docstrings and comments of a Python file, each with its first line's number."""
    texts = [(statement.lineno, text) for _, statement, text in _docstrings(code)]
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            texts.append((token.start[0], token.string.lstrip("#: ")))
    return texts


def _count(code: str) -> Counter[str]:
    counts = Counter(files=1, lines=code.count("\n"))
    lines = code.splitlines()
    # Docstrings and comments don't count as code, because deleting text must not raise the share of other lines.
    for _, statement, _ in _docstrings(code):
        lines[statement.lineno - 1 : statement.end_lineno] = [""] * ((statement.end_lineno or 0) - statement.lineno + 1)
    counts["code lines"] = sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines)
    for node in _nodes(code):
        counts["if"] += isinstance(node, (ast.If, ast.IfExp))
    for node in _nodes(code)[0].body:  # type: ignore[attr-defined]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            counts["import lines"] += (node.end_lineno or node.lineno) - node.lineno + 1
    for node, _, text in _docstrings(code):
        if not isinstance(node, ast.Module):
            counts["first lines"] += 1
            counts["words in first lines"] += len(text.partition("\n")[0].split())
    counts["Any"] = len(re.findall(r"\bAny\b", code))
    counts["dict of Any"] = len(re.findall(r"(?:dict|Mapping)\[str, Any\]", code))
    return counts


def measure_source(folder: Path = SOURCE) -> dict[str, float]:
    """Return the size of the Python source below `folder`: per 1,000 lines where the name says so."""
    counts: Counter[str] = Counter()
    prose: list[str] = []
    for path in _python_files(folder):
        code = path.read_text(encoding="utf-8")
        counts += _count(code)
        prose += [text for _, text in prose_of(code)]
    lines = counts["lines"] or 1
    return {
        "lines": counts["lines"],
        "files": counts["files"],
        "percent of code lines that import": round(100 * counts["import lines"] / (counts["code lines"] or 1), 2),
        "Any per 1,000 lines": round(1000 * counts["Any"] / lines, 1),
        "dict[str, Any] per 1,000 lines": round(1000 * counts["dict of Any"] / lines, 2),
        "if per 1,000 code lines": round(1000 * counts["if"] / (counts["code lines"] or 1), 1),
        "words in a first docstring line": round(counts["words in first lines"] / (counts["first lines"] or 1), 2),
        "marks in docstrings and comments": marks_per_1000_words(prose),
    }


def marks_per_1000_words(texts: list[str]) -> float:
    """Return how many marks of stilted English 1,000 words of the texts have on average."""
    words = sum(len(_WORD.findall(text)) for text in texts)
    return round(1000 * sum(len(_MARK.findall(text)) for text in texts) / (words or 1), 2)


def _texts_of_docs() -> list[str]:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in sorted(pages) if path.name.count(".") == 1]
    return [re.sub(r"```.*?```|`[^`\n]*`", " ", text, flags=re.DOTALL) for text in texts]


def _words_of_docs() -> int:
    """Return how many words the English pages in docs/ have, as `wc -w` counts them; promises.md is generated."""
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name.count(".") == 1 and path.stem != "promises"]
    return sum(len(path.read_text(encoding="utf-8").split()) for path in pages)


def _texts_of_help() -> list[str]:
    """Return the help of the command line: of each command, option and argument, as its source has it."""
    texts = []
    for path in _python_files(SOURCE / "cli"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                texts += [_constant(word.value) for word in node.keywords if word.arg in ("help", "epilog")]
    return texts


def _texts_of_errors() -> list[str]:
    """Return the text of each `raise` in the source."""
    return [
        " ".join(_constant(part) for part in ast.walk(node.exc) if isinstance(part, ast.Constant))
        for path in _python_files(SOURCE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and node.exc is not None
    ]


def _texts_of_page() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in sorted((SOURCE / "ui" / "templates").glob("*.html"))]
    return [re.sub(r"\{[{%#].*?[}%#]\}|<[^>]*>", " ", text, flags=re.DOTALL) for text in texts]


def _constant(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def measure_texts() -> dict[str, float]:
    """Return the words of the docs, and the marks of stilted English in 1,000 words of the texts that users read."""
    return {
        "marks in docs": marks_per_1000_words(_texts_of_docs()),
        "words in docs": _words_of_docs(),
        "marks in the command line's help": marks_per_1000_words(_texts_of_help()),
        "marks in error texts": marks_per_1000_words(_texts_of_errors()),
        "marks in the page": marks_per_1000_words(_texts_of_page()),
    }


def measure() -> dict[str, float]:
    return {**measure_source(), **measure_texts()}


@pytest.fixture(scope="module")
def numbers() -> dict[str, float]:
    return measure()


@pytest.mark.parametrize("name", CEILINGS)
def test_code_metric_is_not_above_its_ceiling(numbers: dict[str, float], name: str) -> None:
    assert numbers[name] <= CEILINGS[name], "python -m tests.test_ratchets shows where"


def test_every_code_metric_has_a_ceiling(numbers: dict[str, float]) -> None:
    assert set(numbers) == set(CEILINGS)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Wait until copies to the CPU have finished.", 0),
        ("What comes to the CPU is waited for.", 2),
        ("Raise an error unless the nodes are ready.", 0),
        ("A record there that is none is refused, lest whoever reads it is told so.", 4),
    ],
)
def test_stilted_phrases_of_a_sentence_are_counted(text: str, count: int) -> None:
    assert len(_MARK.findall(text)) == count


def test_code_metrics_count_lines_branches_imports_and_uses_of_typing_any() -> None:
    code = '"""Say it."""\nfrom typing import Any\n' + (
        "def f(x: dict[str, Any]) -> int:\n    # None is none.\n    return 1 if x else 0\n"
    )
    counts = _count(code)
    assert (counts["lines"], counts["if"], counts["Any"], counts["dict of Any"], counts["import lines"]) == (
        5,
        1,
        2,
        1,
        1,
    )
    assert prose_of(code) == [(1, "Say it."), (4, "None is none.")]


def _print_marks(folder: Path) -> None:
    for path in _python_files(folder):
        for line, text in prose_of(path.read_text(encoding="utf-8")):
            for match in _MARK.finditer(text):
                at = line + text.count("\n", 0, match.start())
                around = text[max(0, match.start() - 40) : match.end() + 30].replace("\n", " ")
                print(f"{path}:{at}: {match.group()!r} in: {around}")


def main(words: list[str]) -> None:
    folders = [Path(word).resolve() for word in words if word != "--marks"]
    for folder in folders or [SOURCE]:
        if "--marks" in words:
            _print_marks(folder)
        for name, value in {**measure_source(folder), **({} if folders else measure_texts())}.items():
            ceiling = "" if folders else f"  (ceiling {CEILINGS.get(name)})"
            print(f"{name:40} {value:>10}{ceiling}")


if __name__ == "__main__":
    main(sys.argv[1:])
