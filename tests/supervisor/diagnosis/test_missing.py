"""Where a file is that a script did not find."""

from __future__ import annotations

import pytest

from paceline.runs.work_dir import Place
from paceline.supervisor.diagnosis.missing import missing_text
from paceline.system.linked import NotCopied
from tests.helpers import make_job

AT = Place("home/ann/p", "home/ann/p", "/home/ann/p")
NOT_COPIED = [
    NotCopied(path="data", why="ignored by 'data/' in .gitignore", is_linked=True, is_folder=True),
    NotCopied(path="out", why="results of earlier runs", is_linked=False, is_folder=True),
    NotCopied(path="lib", why="ignored by 'lib' in .gitignore", is_linked=True, is_folder=True),
]


def told(exception: str, *, is_shared: bool = True, cwd: str | None = ".", there: bool = True) -> str | None:
    job = make_job(working_directory=cwd)
    return missing_text(exception, job, AT, NOT_COPIED, is_shared=is_shared, exists=lambda path: there)


@pytest.mark.parametrize(
    ("name", "cwd"),
    [
        ("out/a.pt", "."),
        ("../out/a.pt", "src"),
        ("/x/ws/runs/p_1_2/work/home/ann/p/out/a.pt", "."),
        ("/home/ann/p/out/a.pt", "."),
    ],
)
def test_file_among_earlier_results_names_the_option_that_links_them(name: str, cwd: str) -> None:
    text = told(f"FileNotFoundError: [Errno 2] No such file or directory: '{name}'", cwd=cwd)
    path = "'/home/ann/p/out/a.pt'"
    assert (
        text
        == f"It is there as {path}, among results of earlier runs, which a run does not see. Bring them: --link out."
    )


@pytest.mark.parametrize(
    ("exception", "path"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/x.txt'", "data"),
        ("ModuleNotFoundError: No module named 'lib.model'", "lib"),
    ],
)
def test_ignored_data_on_another_machine_names_the_pattern_and_the_input(exception: str, path: str) -> None:
    text = told(exception, is_shared=False)
    assert text is not None
    assert f"in .gitignore. Send it as an input: --input NAME={path}." in text
    # Where it is linked, something else is missing.
    assert told(exception) is None


def test_file_above_an_estimators_source_names_the_folder_to_give() -> None:
    exception = "FileNotFoundError: [Errno 2] No such file or directory: '../conf/a.yaml'"
    text = told(exception, cwd=None)
    assert text is not None
    assert text.endswith("which alone is copied. Give source_directory='/home/ann'.")
    assert told(exception, cwd=None, there=False) is None


def test_other_errors_and_files_that_are_nowhere_say_nothing() -> None:
    assert told("ValueError: 'out/a.pt'") is None
    assert told("FileNotFoundError: [Errno 2] No such file or directory: 'nowhere'") is None
    assert told("FileNotFoundError: [Errno 2] No such file or directory: 'out/a.pt'", there=False) is None


def test_module_that_is_not_installed_names_the_option_that_installs_it() -> None:
    for module, name in (("tabulate", "tabulate"), ("yaml", "pyyaml")):
        text = told(f"ModuleNotFoundError: No module named '{module}'", there=False)
        assert text is not None
        assert text.endswith(f"Install it there: --pip {name} (pip_packages=['{name}']).")
    for module in ("sklearn.externals", "tomllib"):
        assert told(f"ModuleNotFoundError: No module named '{module}'", there=False) is None
