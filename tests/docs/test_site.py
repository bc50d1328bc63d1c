"""The site has every page, and each public name is documented. mkdocs itself is not needed: `make docs` builds the site."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from importlib import import_module
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

import paceline.parallel
from tests.docs.pages import DOCS, ROOT, links

HOOK = (ROOT / ".ci" / "site.py").read_text()
REFERENCE: dict[str, tuple[str, str | None]] = ast.literal_eval(
    re.search(r"^REFERENCE = (\{.*?^\})", HOOK, re.MULTILINE | re.DOTALL)[1]  # type: ignore[index]
)
MODULES = sorted({module for module, _ in REFERENCE.values()})


class _Reader(yaml.SafeLoader):
    """Reads mkdocs.yml without loading the names in it."""


_Reader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), _Reader)


def pages_of(entry: Any) -> list[str]:
    """The pages of a part of the navigation, in order."""
    if isinstance(entry, dict):
        entry = list(entry.values())
    return [entry] if isinstance(entry, str) else [page for part in entry for page in pages_of(part)]


@pytest.mark.promise("site-page-order-somebody-needs")
def test_site_navigation_has_each_page_once() -> None:
    """The hook fills in the pages of public names."""
    named = pages_of(SITE["nav"])
    assert sorted(named) == sorted(set(named))
    pages = (*DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md"), *DOCS.glob("contributing/*.md"))
    assert {str(page.relative_to(DOCS)) for page in pages} <= set(named)
    from_elsewhere = dict(re.findall(r'^    "([\w./]+)": "([\w./-]+)",$', HOOK, re.MULTILINE))
    assert not [page for page in named if not (DOCS / page).exists() and page not in from_elsewhere.values()]
    assert not [name for name in from_elsewhere if not (ROOT / name).exists()]


@pytest.mark.promise("site-page-order-somebody-needs")
def test_site_navigation_has_the_intended_order() -> None:
    assert [next(iter(entry)) for entry in SITE["nav"]] == [
        "Start",
        "Train on one process",
        "Train on many",
        "On other machines",
        "Data",
        "Tune",
        "Register",
        "Serve",
        "Watch",
        "When it fails",
        "When it hangs",
        "When it is slow",
        "Coming from",
        "Reference",
        "Contributing",
    ]


def test_decisions_page_lists_every_decision_note() -> None:
    listed = {link.rpartition("/")[2] for link in links(DOCS / "contributing" / "decisions.md")}
    assert listed == {page.name for page in (DOCS / "decisions").glob("*.md")}


@pytest.mark.promise("site-page-order-somebody-needs")
def test_documentation_site_loads_nothing_from_other_hosts() -> None:
    assert SITE["theme"]["font"] is False
    assert not {"repo_url", "extra_css", "extra_javascript", "extra"} & set(SITE)
    assert SITE["strict"] is True


def test_pictures_equal_the_output_of_their_script() -> None:
    script = runpy.run_path(str(DOCS / "pictures" / "draw.py"))
    drawn = script["draw"]()
    assert {path.name for path in (DOCS / "pictures").glob("*.svg")} == set(drawn)
    for name, text in drawn.items():
        assert (DOCS / "pictures" / name).read_text() == text, f"run python docs/pictures/draw.py: {name}"
        ElementTree.fromstring(text)


def test_reference_lists_each_public_name_of_the_package_once() -> None:
    modules = ("paceline", "paceline.functions")
    shown = [name for module, names in REFERENCE.values() if module in modules for name in (names or "").split()]
    elsewhere = {*paceline.parallel.__all__, "errors", "__version__"}
    assert sorted(shown) == sorted(set(paceline.__all__) - elsewhere)


@pytest.mark.promise("public-name-method-property-says")
@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    assert not without_docstrings(import_module(module))


def test_public_class_or_method_without_a_docstring_is_detected() -> None:
    module = ModuleType("paceline.some")

    class Silent:
        def asked(self) -> None: ...

        @property
        def seen(self) -> int:
            """How many."""
            return 1

    Silent.__module__ = "paceline.some"
    module.Silent = Silent  # type: ignore[attr-defined]
    assert without_docstrings(module) == ["Silent", "Silent.asked"]


def without_docstrings(module: ModuleType) -> list[str]:
    """The public names of a module that say nothing of themselves, and of its classes the methods and properties."""
    found = []
    classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
    for name in getattr(module, "__all__", classes):
        value = getattr(module, name)
        if inspect.isclass(value) and value.__module__.startswith("paceline"):
            # Python gives a dataclass without a docstring its signature as docstring.
            if not (doc := vars(value).get("__doc__")) or doc.startswith(f"{name}("):
                found.append(name)
            found += [f"{name}.{member}" for member in vars_of(value) if not inspect.getdoc(getattr(value, member))]
        elif callable(value) and not inspect.getdoc(value):
            found.append(name)
    return found


def vars_of(cls: type) -> list[str]:
    """The public methods and properties that a class has from Paceline's own classes."""
    found = []
    for name in dir(cls):
        home = next(base for base in cls.__mro__ if name in vars(base)) if not name.startswith("_") else object
        value = inspect.getattr_static(cls, name)
        is_method = isinstance(value, (classmethod, staticmethod, property)) or inspect.isfunction(value)
        # A function that another module has assigned to the class is not one of its methods.
        own = "." in getattr(getattr(value, "__func__", value), "__qualname__", ".")
        if home.__module__.startswith("paceline") and is_method and own:
            found.append(name)
    return found
