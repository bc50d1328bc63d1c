"""A release is made only where tag, version and changelog agree."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import write_tree

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def release() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_tree(folder: Path) -> Path:
    files = {
        "pyproject.toml": '[project]\nname = "paceline"\nversion = "1.2.0"\n',
        "src/paceline/__init__.py": '"""Doc."""\n__version__ = "1.2.0"\n',
        "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.0\n",
        "CHANGELOG.md": "# Changelog\n\n## 1.2.0, 2026-12-01\n\n- New.\n\n## 1.1.0, 2026-11-01\n",
        "changes/README.md": "Fragments.\n",
    }
    write_tree(folder, files)
    return folder


def test_tag_that_agrees_with_version_and_changelog_is_released(release: Any, tmp_path: Path) -> None:
    assert release.problems("v1.2.0", make_tree(tmp_path)) == []


@pytest.mark.parametrize(
    ("tag", "changed", "problem"),
    [
        ("1.2.0", {}, "is not of the form"),
        ("v1.3.0", {}, "pyproject.toml has version 1.2.0, the tag 1.3.0"),
        ("v1.2.0", {"CITATION.cff": "cff-version: 1.2.0\n"}, "CITATION.cff has version none"),
        ("v1.2.0", {"CHANGELOG.md": "## 1.1.0, 2026-11-01\n"}, "CHANGELOG.md begins with 1.1.0"),
        ("v1.2.0", {"CHANGELOG.md": "## 1.2.0, not yet released\n"}, "no date"),
        ("v1.2.0", {"changes/7.fix.md": "Mended.\n"}, "changes/ still has 7.fix.md"),
    ],
)
def test_release_tag_of_wrong_form_or_version_is_refused_with_the_reason(
    release: Any, tmp_path: Path, tag: str, changed: dict[str, str], problem: str
) -> None:
    folder = make_tree(tmp_path)
    write_tree(folder, changed)
    assert problem in "; ".join(release.problems(tag, folder))


def test_all_repository_files_that_contain_the_version_number_contain_the_same_one(release: Any) -> None:
    versions = {text.split(" has version ")[1] for text in release.problems("v99.0.0") if " has version " in text}
    assert len(versions) == 1


def test_digits_example_imports_only_torch_paceline_and_the_standard_library() -> None:
    modules = set()
    for path in (ROOT / "examples" / "digits").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(str(node.module).partition(".")[0])
    assert modules - sys.stdlib_module_names == {"torch", "paceline"}


def test_release_with_placeholder_addresses_is_refused(release: Any, tmp_path: Path) -> None:
    folder = make_tree(tmp_path)
    write_tree(
        folder,
        {
            "pyproject.toml": '[project]\nversion = "1.2.0"\n[project.urls]\nSource = "https://example.org/paceline"\n',
            "README.md": "<!-- until the first release -->\nNot yet.\n<!-- end -->\n",
        },
    )
    found = release.problems("v1.2.0", folder)
    assert len(found) == 2
    assert "example.org" in found[0]
    assert "README.md" in found[1]
