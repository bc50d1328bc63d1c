"""The site's search finds the right page for words that people type: it is among the first three."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.engines.conftest import require_engine

#: A user's search words -> the page that the search should find.
QUERIES = {
    "quickstart": "quick-start",
    "getting started": "quick-start",
    "install": "install",
    "example": "examples",
    "multiple gpus": "several-gpus",
    "multi-gpu": "several-gpus",
    "ddp": "several-gpus",
    "fsdp": "parallel",
    "tensor parallel": "parallel",
    "multi node": "several-machines",
    "multiple machines": "several-machines",
    "ssh": "ssh",
    "ssh key": "ssh",
    "slurm": "slurm",
    "ray": "ray",
    "kubernetes": "kubernetes",
    "docker": "containers",
    "retry": "restart-and-resume",
    "restart": "restart-and-resume",
    "resume": "restart-and-resume",
    "checkpoint": "checkpoints",
    "preemption": "restart-and-resume",
    "wandb": "trackers",
    "weights & biases": "trackers",
    "mlflow": "trackers",
    "tensorboard": "trackers",
    "out of memory": "when-it-fails",
    "oom": "when-it-fails",
    "error": "when-it-fails",
    "hang": "when-it-hangs",
    "deadlock": "when-it-hangs",
    "slow": "when-it-is-slow",
    "profiler": "when-it-is-slow",
    "port": "security",
    "firewall": "security",
    "proxy": "private-packages",
    "private index": "private-packages",
    "offline": "private-packages",
    "pip": "environments",
    "conda": "environments",
    "virtualenv": "environments",
    "requirements.txt": "environments",
    "secret": "secrets",
    "api key": "secrets",
    "environment variable": "worker-environment",
    "hyperparameter": "sweeps",
    "grid search": "sweeps",
    "early stopping": "sweeps",
    "seed": "sweeps",
    "deploy": "services",
    "inference": "serving",
    "register model": "models",
    "logs": "runs",
    "metrics": "runs",
    "cancel": "runs",
    "time limit": "runs",
    "email": "runs",
    "jupyter": "runs",
    "s3": "data",
    "dataset": "partitions",
    "dashboard": "ui",
    "gradient accumulation": "microbatches",
    "torchrun": "from-torchrun",
    "accelerate": "from-torchrun",
    "horovod": "horovod",
    "elastic": "elastic",
    "python version": "versions",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. The theme's search needs a JavaScript engine."""
    if find_spec("material") is None:
        pytest.skip("mkdocs-material is missing: `make docs` installs it and runs this")
    require_engine("node", shutil.which("node"))
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return folder


def search(site: Path, *queries: str) -> list[list[str]]:
    """Return the pages that the site's search finds for each query, the best first."""
    words = ["node", str(Path(__file__).with_name("search.js")), str(site), *queries]
    done = subprocess.run(words, capture_output=True, check=True, text=True)
    assert "Invalid query" not in done.stderr
    found: list[list[str]] = json.loads(done.stdout)
    return found


def test_search_test_has_at_least_60_queries() -> None:
    assert len(QUERIES) >= 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_documentation_search_lists_the_expected_page_of_each_query_among_its_first_three_results(site: Path) -> None:
    found = dict(zip(QUERIES, search(site, *QUERIES), strict=True))
    missed = {query: found[query][:5] for query, page in QUERIES.items() if f"{page}.html" not in found[query][:3]}
    assert missed == {}


@pytest.mark.slow
def test_search_for_each_word_of_the_headings_ends_without_an_error(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    words = sorted({word for page in index["docs"] for word in re.findall(r"\w{4,}", page["title"])})
    assert len(words) > 500
    search(site, *words)


@pytest.mark.slow
def test_search_does_not_find_pages_for_contributors(site: Path) -> None:
    [found] = search(site, "decision")
    assert [page for page in found if page.startswith(("decisions/", "contributing"))] == []
