"""Where a file is that a script did not find."""

from __future__ import annotations

import pytest

from paceline.runs.work_dir import Place
from paceline.supervisor.diagnosis.missing import missing_text
from paceline.system.linked import NotCopied
from tests.helpers import make_job

AT = Place("home/ann/p", "home/ann/p", "/home/ann/p")
NOT_COPIED = [
    NotCopied(path="data", why="ignored", is_linked=True, is_folder=True, kept_back="more than 1 GB"),
    NotCopied(path="out", why="results of earlier runs", is_linked=False, is_folder=True),
    NotCopied(path="lib", why="ignored by 'lib' in .gitignore", is_linked=True, is_folder=True, is_sent=True),
]


def told(
    exception: str, *, is_shared: bool = True, cwd: str | None = ".", there: bool = True, sees_source: bool = True
) -> str | None:
    job = make_job(working_directory=cwd)
    return missing_text(
        exception,
        job,
        AT,
        NOT_COPIED,
        is_shared=is_shared,
        exists=lambda path: sees_source if path == AT.source else there,
    )


@pytest.mark.parametrize(
    ("name", "cwd", "option"),
    [
        ("out/a.pt", ".", "--link out"),
        ("../out/a.pt", "src", "--link ../out"),
        ("/x/ws/runs/p_1_2/work/home/ann/p/out/a.pt", ".", "--link out"),
        ("/home/ann/p/out/a.pt", ".", "--link out"),
    ],
)
def test_file_among_earlier_results_names_the_option_that_links_them(name: str, cwd: str, option: str) -> None:
    text = told(f"FileNotFoundError: [Errno 2] No such file or directory: '{name}'", cwd=cwd)
    path = "'/home/ann/p/out/a.pt'"
    assert (
        text == f"It is there as {path}, among results of earlier runs, which a run does not see. Bring them: {option}."
    )


@pytest.mark.parametrize(
    ("exception", "end"),
    [
        ("No such file or directory: 'data/x.txt'", "not sent: more than 1 GB. Send it: --send data (send=['data'])."),
        ("No such file or directory: 'out/x.pt'", "results of earlier runs. Send it: --send out (send=['out'])."),
        ("No such file or directory: 'lib/.env'", "that of a secret. Send it: --send lib/.env (send=['lib/.env'])."),
        ("No such file or directory: '/home/ann/p/lib/a'", "Open it by its path from the working directory: 'lib/a'."),
    ],
)
def test_data_that_another_machine_lacks_names_the_reason_and_the_option_that_sends_it(
    exception: str, end: str
) -> None:
    exception = f"FileNotFoundError: [Errno 2] {exception}"
    text = told(exception, is_shared=False)
    assert text is not None
    assert text.endswith(end)


def test_supervisor_that_does_not_see_the_project_says_what_was_not_sent() -> None:
    """On a cluster: its nodes share a folder with it, and neither has the user's."""
    start = "FileNotFoundError: [Errno 2] No such file or directory: "
    assert (
        told(f"{start}'data/x.txt'", there=False, sees_source=False)
        == "'data' lies on the submitting machine, and was not sent: more than 1 GB. Send it: --send data (send=['data'])."
    )
    assert told(f"{start}'lib/x.txt'", there=False, sees_source=False) is None


def test_linked_file_that_is_missing_says_nothing() -> None:
    assert told("FileNotFoundError: [Errno 2] No such file or directory: 'data/x.txt'") is None


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
