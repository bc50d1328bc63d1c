"""Requirements files, read as pip reads them."""

from __future__ import annotations

import pytest

from paceline.environments import requirements
from paceline.environments.environment import Environment
from paceline.errors import EnvironmentSpecError
from tests.helpers import write_tree

FILE = """
name: ignored
prefix: /ignored
channels:
  - conda-forge
  - ./local channel
dependencies:
  - python=3.11
  - numpy >=2
  - pip:
      - einops
      - -r more.txt
      - --extra-index-url https://host/simple
variables:
  LEVEL: 3
"""


def read(folder, **files):
    """What `main.txt` says, of files whose names have no ending."""
    write_tree(folder, {f"{name}.txt": text for name, text in files.items()})
    return requirements.read(folder / "main.txt")


def test_comments_and_empty_lines_are_dropped_and_continued_lines_joined(tmp_path):
    text, constraints = read(tmp_path, main="# a\n\nnumpy<3  # why\n\nfoo==1 \\\n  --hash=sha256:00\n")
    assert text.splitlines() == ["numpy<3", "foo==1 --hash=sha256:00"]
    assert constraints == ()


def test_fragment_of_a_requirement_url_is_not_removed_as_a_comment(tmp_path):
    assert read(tmp_path, main="x @ https://host/x.whl#sha256=00\n")[0] == "x @ https://host/x.whl#sha256=00\n"


def test_included_requirements_replace_their_include_line(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep.txt").write_text("-r deeper.txt\nc\n")
    (tmp_path / "sub" / "deeper.txt").write_text("b")
    assert read(tmp_path, main="a\n-r sub/deep.txt\n--requirement=other.txt\n", other="d")[0] == "a\nb\nc\nd\n"


def test_constraints_from_constraint_files_are_returned_separately_from_requirements(tmp_path):
    text, constraints = read(tmp_path, main="a\n-c limits.txt\n", limits="b<2\n-r more.txt\n", more="c<3\n")
    assert (text, constraints) == ("a\n", ("b<2", "c<3"))


def test_short_options_of_a_requirements_file_are_replaced_by_their_long_names(tmp_path):
    text, _ = read(
        tmp_path,
        main="-i https://a/simple?key=1\n--extra-index-url=https://b/simple\n--extra-index-url https://d/simple?key=1\n--pre\n-f https://c/links\na\n",
    )
    assert text.splitlines() == [
        "--index-url https://a/simple?key=1",
        "--extra-index-url https://b/simple",
        "--extra-index-url https://d/simple?key=1",
        "--pre",
        "--find-links https://c/links",
        "a",
    ]


def test_paths_in_an_included_requirements_file_are_relative_to_that_file(tmp_path):
    write_tree(tmp_path, {"sub/pkg/pyproject.toml": "", "sub/dist/w-1-py3-none-any.whl": b"", "sub/links/x": b""})
    (tmp_path / "sub" / "paths.txt").write_text(
        "./pkg\n-e ./pkg[dev]\ndist/w-1-py3-none-any.whl ; python_version > '3'\n-f links\n"
    )
    sub = tmp_path / "sub"
    assert read(tmp_path, main="-r sub/paths.txt")[0].splitlines() == [
        f"{sub}/pkg",
        f"-e {sub}/pkg[dev]",
        f"{sub}/dist/w-1-py3-none-any.whl ; python_version > '3'",
        f"--find-links {sub}/links",
    ]


def test_relative_path_is_resolved_in_the_working_directory(tmp_path, monkeypatch):
    write_tree(tmp_path, {"work/pkg/setup.py": "", "files/main.txt": "./pkg\n"})
    monkeypatch.chdir(tmp_path / "work")
    assert requirements.read(tmp_path / "files" / "main.txt")[0] == f"{tmp_path}/work/pkg\n"


def test_byte_order_mark_and_windows_line_ends_are_ignored(tmp_path):
    (tmp_path / "main.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    assert requirements.read(tmp_path / "main.txt")[0] == "a\nb\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nnumpy 2.0\n", r"main\.txt, line 2: 'numpy 2.0' is not a requirement that pip can parse"),
        ("a==\n", r"line 1: 'a=='"),
        ("numpy=2\n", r"line 1: 'numpy=2'"),
        ("a\n\n\n\\\n!!\n", r"line 4: '!!'"),
        ("--no-such-option x\n", r"line 1: '--no-such-option x' is not an option of a requirements file"),
        ("--index-url\n", "is not an option of a requirements file"),
        ("./nowhere\n", r"there is no '.*/nowhere'"),
        ("missing-1-py3-none-any.whl\n", r"there is no '.*missing-1"),
        ("-r nowhere.txt\n", r"line 1: there is no file '.*nowhere.txt', which '--requirement nowhere.txt' includes"),
        ("-r https://host/r.txt\n", "is read from the network"),
        ("-r main.txt\n", "requirements files include each other: .*main.txt -> .*main.txt"),
    ],
)
def test_invalid_requirement_is_refused_with_file_line_and_reason(tmp_path, text, message):
    with pytest.raises(EnvironmentSpecError, match=message):
        read(tmp_path, main=text)


def test_requirement_on_a_folder_without_pyproject_toml_or_setup_py_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EnvironmentSpecError, match=r"has neither pyproject\.toml nor setup\.py"):
        read(tmp_path, main="./empty\n")


def test_files_that_include_each_other_are_refused(tmp_path):
    with pytest.raises(EnvironmentSpecError, match=r"main\.txt -> .*a\.txt -> .*b\.txt -> .*a\.txt"):
        read(tmp_path, main="-r a.txt", a="-r b.txt", b="-r a.txt")


def test_file_included_twice_is_not_circular(tmp_path):
    assert read(tmp_path, main="-r a.txt\n-r a.txt\n", a="x")[0] == "x\nx\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read: No such file"),
        (b"a\xff\n", "is not UTF-8: .* at byte 1"),
        ("folder", "can't be read: Is a dir"),
    ],
)
def test_unreadable_requirements_file_is_named_in_the_error(tmp_path, content, message):
    path = tmp_path / "a file.txt"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(EnvironmentSpecError, match=rf"a file\.txt' {message}"):
        requirements.read(path)


def test_password_in_a_requirements_file_is_refused_and_not_shown(tmp_path):
    (tmp_path / "r.txt").write_text("--index-url https://me:hunter2@host/simple\n")
    with pytest.raises(EnvironmentSpecError, match="pip_requirements, line 1,") as caught:
        Environment.from_pip_requirements("x", tmp_path / "r.txt")
    assert "hunter2" not in str(caught.value)
    (tmp_path / "r.txt").write_text("x @ https://me:hunter2@host/simple/x.whl extra words\n")
    with pytest.raises(EnvironmentSpecError) as caught:
        Environment.from_pip_requirements("x", tmp_path / "r.txt")
    assert "hunter2" not in str(caught.value)


def test_empty_requirements_file_needs_no_build(tmp_path):
    (tmp_path / "r.txt").write_text("\n# nothing\n")
    assert not Environment.from_pip_requirements("x", tmp_path / "r.txt").needs_build


def test_include_line_in_requirements_text_is_refused_with_a_hint_at_from_pip_requirements():
    with pytest.raises(EnvironmentSpecError, match=r"Read the file with Environment\.from_pip_requirements"):
        requirements.lines_of(Environment(pip_requirements="-r other.txt"))


def test_pip_option_in_pip_packages_is_refused():
    with pytest.raises(EnvironmentSpecError, match="which is an option"):
        requirements.lines_of(Environment(pip_packages=["--pre"]))


def test_conda_file_becomes_an_environment(tmp_path):
    write_tree(tmp_path, {"environment.yml": FILE, "more.txt": "tqdm\n-c limits.txt\n", "limits.txt": "tqdm<5\n"})
    assert Environment.from_conda_specification("mine", tmp_path / "environment.yml") == Environment(
        name="mine",
        conda_packages=["python=3.11", "numpy >=2"],
        conda_channels=["conda-forge", str(tmp_path / "local channel")],
        pip_requirements="einops\ntqdm\n--extra-index-url https://host/simple\n",
        pip_constraints=["tqdm<5"],
        environment_variables={"LEVEL": "3"},
    )


def test_pip_packages_alone_need_no_conda(tmp_path):
    (tmp_path / "e.yml").write_text("dependencies: [{pip: [einops]}]")
    found = Environment.from_conda_specification("mine", tmp_path / "e.yml")
    assert (found.uses_conda, found.needs_build) == (False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no packages"),
        ("name: x", "names no packages"),
        ("- a\n- b", "names no packages"),
        ("dependencies: [a", "is not YAML"),
        ("dependencies: numpy", "dependencies is 'numpy', not a list"),
        ("dependencies: [3.11]", "dependencies has 3.11"),
        ("dependencies: [{conda: [a]}]", r"dependencies has \{'conda'"),
        ("dependencies: [{pip: einops}]", r"dependencies has \{'pip'"),
        ("dependencies: [{pip: [3]}]", "under pip has 3"),
        ("dependencies: [{pip: [a b]}]", r"e\.yml, pip: 'a b': 'a b' is not a requirement"),
        ("dependencies: [a]\nchannels: conda-forge", "channels is 'conda-forge', not a list"),
        ("dependencies: [a]\nchannels: [3]", "channels has 3"),
        ("dependencies: [a]\nchanels: [x]", r"has \['chanels'\]; known are"),
        ("dependencies: [a]\nvariables: [x]", "variables is not a mapping"),
    ],
)
def test_invalid_conda_file_is_refused_with_the_bad_entry(tmp_path, text, message):
    (tmp_path / "e.yml").write_text(text)
    with pytest.raises(EnvironmentSpecError, match=message) as caught:
        Environment.from_conda_specification("mine", tmp_path / "e.yml")
    assert "e.yml" in str(caught.value)


def test_missing_conda_file_is_named_in_the_error(tmp_path):
    with pytest.raises(
        EnvironmentSpecError, match=r"the conda environment file '.*nowhere.yml' can't be read: No such file"
    ):
        Environment.from_conda_specification("mine", tmp_path / "nowhere.yml")
