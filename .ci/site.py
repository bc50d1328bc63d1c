"""What mkdocs makes of the repository beside docs/: the first page, the pages of the public names, and links that leave docs/.

mkdocs reads it as a hook (mkdocs.yml). Nothing of it is needed to read docs/ as files.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from paceline.compat.azureml.check import names

ROOT = Path(__file__).resolve().parents[1]

#: Files of the repository that are pages of the site -> where they stand there, as a path below docs/.
PAGES = {
    "README.md": "index.md",
    "README.es.md": "index.es.md",
    "README.pt.md": "index.pt.md",
    "README.ru.md": "index.ru.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "SECURITY.md": "reporting.md",
    "changes/README.md": "changelog-fragments.md",
    "LICENSE": "license.md",
    "benchmarks/README.md": "benchmarks.md",
}

#: Pages, or folders of pages, that the search of the site leaves out: the list of all pages, and pages for contributors.
NOT_SEARCHED = (
    "all-pages.md",
    "decisions/",
    "promises.md",
    "changelog",
    "contributing",
    "code-of-conduct.md",
    "license.md",
)

#: The page of the names that `import azureml` has.
AZUREML_NAMES = "python/azureml.md"

#: Title of a page of the reference -> the module whose names it shows, and the names; None for all public ones.
REFERENCE = {
    "Workspaces and runs": ("paceline", "Workspace Experiment Run RunRecord FailureReport import_runs"),
    "Logging": ("paceline", "init log finish Image Audio Video Html Histogram Table"),
    "Estimators and jobs": ("paceline", "Estimator PyTorch TensorFlow SKLearn Job secret"),
    "Functions": ("paceline.functions", "job FunctionJob FunctionRun FunctionRuns"),
    "Environments and data": ("paceline", "Environment Datastore Dataset DataReference"),
    "Sweeps": (
        "paceline",
        "Sweep SweepRun choice uniform quniform loguniform qloguniform normal qnormal lognormal qlognormal randint fixed "
        "Bandit MedianStopping TruncationSelection ASHA Hyperband PopulationBasedTraining",
    ),
    "Pipelines": ("paceline", "Pipeline Step PipelineData PipelineParameter PipelineRun"),
    "Models and services": ("paceline", "Model Service"),
    "Parallel training": ("paceline.parallel", None),
    "Checkpoints": ("paceline.checkpoint", None),
    "Errors": ("paceline.errors", None),
}
#: Shown above the names of each page: what the examples in it take for granted.
EXAMPLES = (
    "The examples begin with `import paceline as pl`, in a folder with the files that they name: `train.py` trains and logs "
    "`loss`, and `broken.py` raises an exception."
)

_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Fills in the parts of the navigation that follow from what is there."""
    for section in config.nav:
        if "Reference" in section:
            for entry in section["Reference"]:
                if isinstance(entry, dict) and "Python" in entry:
                    entry["Python"] = [{title: page_of(title)} for title in REFERENCE]
                    entry["Python"].append({"Names of azureml": AZUREML_NAMES})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that don't lie in docs/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text()
        if name == "LICENSE":
            text = f"# License\n\n```text\n{text}\n```\n"
        files.append(File.generated(config, page, content=text))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), content=path.read_text()))
    for title in REFERENCE:
        files.append(File.generated(config, page_of(title), content=reference(title)))
    content = f"# Names of azureml\n\nLook up which names of the Azure SDK programs can import.\n\n{names.table()}"
    files.append(File.generated(config, AZUREML_NAMES, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page's text with links as they lead on the site, and what GitHub's Markdown takes where this one is stricter."""
    if page.file.src_uri.startswith(NOT_SEARCHED):
        page.meta["search"] = {"exclude": True}
    was_at = {site: name for name, site in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = _FENCE.split(markdown)
    # Every second part is a block of code, in which nothing is a link.
    for number in range(0, len(parts), 2):
        parts[number] = _LINK.sub(lambda link: leads_to(link[0], was_at, page.file.src_uri), parts[number])
        parts[number] = parts[number].replace("-->\n|", "-->\n\n|")
    return "".join(parts)


def leads_to(link: str, was_at: str, page: str) -> str:
    """A link of the repository's file `was_at`, as it has to be on the site's page."""
    name, anchor = (*link.split("#", 1), "")[:2]
    if re.match(r"[a-z]+:", link) or not name:
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(was_at), name))
    # What is neither a page nor below docs/ stays as it is, for mkdocs to complain of.
    target = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else name)
    return posixpath.relpath(target, posixpath.dirname(page) or ".") + (f"#{anchor}" if anchor else "")


def page_of(title: str) -> str:
    """Return the path of a page of the reference, below docs/."""
    return f"python/{title.lower().replace(' ', '-')}.md"


def reference(title: str) -> str:
    """Return a page with the documentation of a group of public names."""
    module, names = REFERENCE[title]
    shown = "".join(f"\n::: {module}.{name}\n" for name in (names.split() if names else public_names(module)))
    about = (
        f"::: {module}\n    options:\n      members: false\n      show_root_heading: false\n" if names is None else ""
    )
    # The search lists guides first: a name such as `Pipeline` begins with the word "pip".
    return f"---\nsearch:\n  boost: 0.3\n---\n\n# {title}\n\n{EXAMPLES}\n\n{about}{shown}"


def public_names(module: str) -> list[str]:
    """The names in the module's `__all__`; without one, its classes. Read from the source: nothing is imported."""
    tree = ast.parse(source(module).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            listed: list[str] = ast.literal_eval(node.value)
            return [name for name in listed if not name.startswith("_") and not source(f"{module}.{name}").exists()]
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def source(module: str) -> Path:
    """The file of a module."""
    path = ROOT / "src" / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


#: What a browser fetches by itself when it shows a page. A link that somebody may follow is not among it.
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*?\bsrc=["']?(?:https?:)?//[^"' >]+"""
    r"""|<link\b(?=[^>]*rel=["']?(?:stylesheet|preconnect|icon|preload))[^>]*?href=["']?(?:https?:)?//[^"' >]+"""
    r"""|url\(["']?(?:https?:)?//[^)]+""",
)


#: The end of lunr's `TokenSet.toString`, minified: str = str + label + node.id.
_TOKEN_KEY = re.compile(r"(\w)=\1\+(\w)\+(\w)\.id\}return \1")


def on_post_build(config: Any) -> None:
    """Repairs the search's index, and refuses a site that asks another host for anything.

    lunr 2.3.9 joins labels and numbers of nodes without a separator, so the key `a` 51 2 equals `a` 5 12: two different nodes
    become one, and a search that meets a word which exists only by that mistake ends without a result.

    Raises:
        PluginError: a page or a style sheet does; both are named.
    """
    site = Path(config.site_dir)
    for path in (site / "assets" / "javascripts" / "workers").glob("search.*.js"):
        path.write_text(_TOKEN_KEY.sub(r'\1=\1+\2+\3.id+","}return \1', path.read_text()))
    for path in sorted((*site.rglob("*.html"), *site.rglob("*.css"))):
        if found := _FETCHED.search(path.read_text()):
            raise PluginError(f"{path.relative_to(site)} asks another host: {found[0]}")
