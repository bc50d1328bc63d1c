"""Parse requirements files, as strictly as pip, and conda environment files.

The lines of an included file replace the `-r` line that includes it, so that one text has all requirements.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from paceline.errors import EnvironmentSpecError
from paceline.job.local_paths import LocalPath, local_path
from paceline.job.secret_values import hidden

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from paceline.job.environment import EnvironmentSpec


#: Options of a requirements file that have a value, including their short names.
_WITH_VALUE = {
    "-i": "--index-url",
    "--pypi-url": "--index-url",
    "-f": "--find-links",
    "-r": "--requirement",
    "-c": "--constraint",
    "-e": "--editable",
    **{
        name: name
        for name in (
            *("--index-url", "--extra-index-url", "--find-links", "--requirement", "--constraint", "--editable"),
            *("--no-binary", "--only-binary", "--trusted-host", "--use-feature", "--build-constraint"),
        )
    },
}
_FLAGS = ("--no-index", "--pre", "--prefer-binary", "--require-hashes")
# A "#" within a word, as in a URL, does not begin a comment.
_COMMENT = re.compile(r"(^|\s)#.*$")
_OWN_OPTIONS = re.compile(r"\s+(--hash|--config-settings?|-C|--global-option)[\s=]")

_CONDA_KEYS = ("name", "channels", "dependencies", "variables", "prefix")


@dataclass(frozen=True, kw_only=True)
class RequirementLine:
    """A parsed line of a requirements file.

    Attributes:
        where: The file and line, for messages.
        value: The option's value, or the text of the requirement or URL.
        option: The name of an option, such as "--index-url". None for a requirement.
        path: The local folder or archive that the line names, or None.
        requirement: The requirement on a named package. For a URL without a name, `path` and `requirement` are None.
        tail: Options of this requirement, such as `--hash=...`.
    """

    where: str
    value: str
    option: str | None = None
    path: LocalPath | None = None
    requirement: Requirement | None = None
    tail: str = ""

    @property
    def text(self) -> str:
        """The line in a form that pip and uv can read."""
        if self.option:
            return f"{self.option} {self.value}".rstrip()
        return self.path.line() if self.path is not None else f"{self.value} {self.tail}".rstrip()


def read(file_path: str | os.PathLike[str]) -> tuple[str, tuple[str, ...]]:
    """Return the requirements and the constraints of a file and its included files.

    Raises:
        EnvironmentSpecError: A file is missing or not UTF-8, includes itself, or pip can't parse a line.
    """
    lines: list[str] = []
    constraints: list[str] = []
    for line, is_constraint in _walk(Path(os.path.abspath(os.path.expanduser(file_path))), (), False):
        # As in pip, an option in a constraints file applies to all requirements, so keep it with the requirements.
        (constraints if is_constraint and not line.option else lines).append(line.text)
    return "".join(f"{line}\n" for line in lines), tuple(constraints)


def lines_of(environment: EnvironmentSpec) -> list[RequirementLine]:
    """Parse the environment's `pip_requirements` and `pip_packages`.

    Raises:
        EnvironmentSpecError: pip can't parse a line.
    """
    lines = list(parse(environment.pip_requirements or "", "pip_requirements", None))
    for package in environment.pip_packages:
        for line in parse(package, f"pip_packages: {hidden(package)!r}", None, numbered=False):
            if line.option is not None and line.option != "--editable":
                raise EnvironmentSpecError(
                    f"pip_packages has {hidden(package)!r}, which is an option. Write options into a requirements file."
                )
            lines.append(line)
    for line in lines:
        if line.option in ("--requirement", "--constraint"):
            raise EnvironmentSpecError(
                f"{line.where}: {hidden(line.text)!r} includes another file, and a text has no place to look for it. "
                "Read the file with Environment.from_pip_requirements(name, path), which includes it."
            )
    return lines


def constraints_of(environment: EnvironmentSpec) -> list[RequirementLine]:
    """Parse the environment's `pip_constraints`.

    Raises:
        EnvironmentSpecError: pip can't parse a line.
    """
    return [
        line
        for text in environment.pip_constraints
        for line in parse(text, f"pip_constraints: {hidden(text)!r}", None, numbered=False)
    ]


def parse(text: str, source: str, folder: Path | None, *, numbered: bool = True) -> Iterator[RequirementLine]:
    """Parse the text of a requirements file, line by line.

    folder: The base of relative paths. numbered: Whether messages have line numbers.

    Raises:
        EnvironmentSpecError: pip can't parse a line; the message names source, line and reason.
    """
    for number, line in logical_lines(text):
        where = f"{source}, line {number}" if numbered else source
        yield _parse_line(line, where, folder)


def _walk(path: Path, above: tuple[Path, ...], is_constraint: bool) -> Iterator[tuple[RequirementLine, bool]]:
    if path in above:
        chain = " -> ".join(str(each) for each in (*above, path))
        raise EnvironmentSpecError(f"requirements files include each other: {chain}. Take one of the -r lines out.")
    for line in parse(read_text(path, "requirements file"), str(path), path.parent):
        if line.option in ("--requirement", "--constraint"):
            if "://" in line.value:
                raise EnvironmentSpecError(
                    f"{line.where}: {hidden(line.text)!r} is read from the network, and might be another file for each run. "
                    "Download it, and name the file."
                )
            included = Path(os.path.abspath(path.parent / os.path.expanduser(line.value)))
            if not included.is_file():
                raise EnvironmentSpecError(
                    f"{line.where}: there is no file {str(included)!r}, which {hidden(line.text)!r} includes. "
                    "Paths are relative to the file that names them."
                )
            yield from _walk(included, (*above, path), is_constraint or line.option == "--constraint")
        else:
            yield line, is_constraint


def read_text(path: Path, what: str) -> str:
    """Return the text of a file that a user has written.

    Raises:
        EnvironmentSpecError: The file can't be read, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EnvironmentSpecError(
            f"the {what} {str(path)!r} can't be read: {error.strerror}. Give the path of a file."
        ) from error
    try:
        # Strip a UTF-8 BOM: it would become part of the first package name.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EnvironmentSpecError(
            f"the {what} {str(path)!r} is not UTF-8: {error.reason} at byte {error.start}. Save it as UTF-8."
        ) from error


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (first line number, line) without comments and empty lines.

    A line that ends with a backslash is joined with the next line.
    """
    joined, first = "", 0
    # Append an empty line, because the text's last line may end with a backslash.
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        first = first or number
        # As in pip, a comment does not continue on the next line, even if it ends with a backslash.
        if line.endswith("\\") and not re.match(r"\s*#", line):
            joined += line[:-1]
            continue
        whole = _COMMENT.sub("", joined + line).strip()
        if whole:
            yield first, whole
        joined, first = "", 0


def _parse_line(line: str, where: str, folder: Path | None) -> RequirementLine:
    if line.startswith("-"):
        return _parse_option(line, where, folder)
    options = _OWN_OPTIONS.search(line)
    head, tail = (line[: options.start()], line[options.start() :].strip()) if options else (line, "")
    path = local_path(line, folder)
    if path is not None:
        return _local(path, line, where)
    if re.match(r"(?:[a-z]+\+)?[a-z]+://", head, re.IGNORECASE):
        return RequirementLine(where=where, value=head, tail=tail)
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return RequirementLine(where=where, value=head, requirement=Requirement(head), tail=tail)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0].rstrip(".: ")
        raise EnvironmentSpecError(
            f"{where}: {hidden(head)!r} is not a requirement that pip can parse: {reason}. Write it as name==1.2, "
            'name[extra]>=1,<2, name @ URL or ./folder; a marker goes behind "; ".'
        ) from error


def _parse_option(line: str, where: str, folder: Path | None) -> RequirementLine:
    # An option is written as "--index-url=URL" or "--index-url URL", and the URL may contain a "=".
    match = re.match(r"(--[^\s=]+)(?:=|\s+|$)(.*)", line, re.DOTALL) or re.match(r"(\S+)\s*(.*)", line, re.DOTALL)
    word, value = match.groups() if match else (line, "")
    # The value of a short option may follow without a space, as in "-rmore.txt".
    if not line.startswith("--") and len(word) > 2 and word[:2] in _WITH_VALUE:
        word, value = word[:2], line[2:]
    value = value.strip()
    if word in _FLAGS and not value:
        return RequirementLine(where=where, option=word, value="")
    option = _WITH_VALUE.get(word)
    if option is None or not value:
        raise EnvironmentSpecError(
            f"{where}: {hidden(line)!r} is not an option of a requirements file. There are "
            f"{', '.join(sorted({*_WITH_VALUE.values(), *_FLAGS}))}."
        )
    if option == "--editable":
        path = local_path(f"-e {value}", folder)
        return _local(path, line, where) if path is not None else RequirementLine(where=where, value=f"-e {value}")
    if option == "--find-links" and "://" not in value:
        there = Path(os.path.expanduser(value))
        inside = (folder or Path.cwd()) / there
        # As in pip, a path is relative to the requirements file's folder if it exists there, else to the working directory.
        value = os.path.abspath(inside if inside.exists() else there)
    return RequirementLine(where=where, option=option, value=value)


def _local(path: LocalPath, line: str, where: str) -> RequirementLine:
    if not path.path.exists():
        raise EnvironmentSpecError(
            f"{where}: there is no {str(path.path)!r}, which {hidden(line)!r} names. Give the path of a folder or an archive."
        )
    if path.path.is_dir() and not any((path.path / name).is_file() for name in ("pyproject.toml", "setup.py")):
        raise EnvironmentSpecError(
            f"{where}: {str(path.path)!r} has neither pyproject.toml nor setup.py, so pip can't install it."
        )
    return RequirementLine(where=where, value=str(path), path=path)


class CondaFile(TypedDict):
    """The content of a conda environment file, as fields of an `EnvironmentSpec`."""

    conda_packages: tuple[str, ...]
    conda_channels: tuple[str, ...]
    pip_requirements: str | None
    pip_constraints: tuple[str, ...]
    environment_variables: dict[str, str]


def read_conda_file(file_path: str | os.PathLike[str]) -> CondaFile:
    """Read a conda environment file. Return its content as fields of an `Environment`.

    Raises:
        EnvironmentSpecError: The file is missing, not YAML, or has an unknown entry.
    """
    import yaml

    path = Path(os.path.abspath(os.path.expanduser(file_path)))
    text = read_text(path, "conda environment file")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise EnvironmentSpecError(f"{str(path)!r} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(data, dict) or not data.get("dependencies"):
        raise EnvironmentSpecError(f"{str(path)!r} names no packages. Write a list under `dependencies:`.")
    if unknown := sorted(str(key) for key in data if key not in _CONDA_KEYS):
        raise EnvironmentSpecError(f"{str(path)!r} has {unknown}; known are {list(_CONDA_KEYS)}.")
    packages, pip = _dependencies(_conda_list(data, "dependencies", path), path)
    text, constraints = _conda_pip(pip, path)
    variables = data.get("variables") or {}
    if not isinstance(variables, dict):
        raise EnvironmentSpecError(f"{str(path)!r}: variables is not a mapping of names to values.")
    return {
        "conda_packages": tuple(packages),
        "conda_channels": tuple(_channel(item, path) for item in _conda_list(data, "channels", path)),
        "pip_requirements": text or None,
        "pip_constraints": constraints,
        "environment_variables": {str(name): str(value) for name, value in variables.items()},
    }


def _conda_list(data: dict[str, object], key: str, path: Path) -> list[object]:
    values = data.get(key) or []
    if not isinstance(values, list):
        raise EnvironmentSpecError(f"{str(path)!r}: {key} is {values!r}, not a list. Begin each with `- `.")
    return values


def _dependencies(items: list[object], path: Path) -> tuple[list[str], list[object]]:
    packages: list[str] = []
    pip: list[object] = []
    for item in items:
        if isinstance(item, str) and item.strip():
            packages.append(item.strip())
        elif isinstance(item, dict) and set(item) == {"pip"} and isinstance(item["pip"] or [], list):
            pip += item["pip"] or []
        else:
            raise EnvironmentSpecError(
                f"{str(path)!r}: dependencies has {item!r}. Each is a text such as `numpy=2.1`, or `pip:` with a list."
            )
    return packages, pip


def _conda_pip(items: list[object], path: Path) -> tuple[str, tuple[str, ...]]:
    lines: list[str] = []
    constraints: list[str] = []
    for item in items:
        text = _text(item, f"{str(path)!r}: the list under pip has {item!r}, which is not a requirement.")
        for line in parse(text, f"{path}, pip: {item!r}", path.parent, numbered=False):
            if line.option in ("--requirement", "--constraint"):
                included, more = read(path.parent / os.path.expanduser(line.value))
                constraints += more
                (lines if line.option == "--requirement" else constraints).extend(included.splitlines())
            else:
                lines.append(line.text)
    return "".join(f"{line}\n" for line in lines), tuple(constraints)


def _text(item: object, refusal: str) -> str:
    if not isinstance(item, str) or not item.strip():
        raise EnvironmentSpecError(refusal)
    return item.strip()


def _channel(item: object, path: Path) -> str:
    text = _text(item, f"{str(path)!r}: channels has {item!r}, which is not a name or a URL.")
    # Make the path of a channel's folder relative to the file that names it.
    if text.startswith(("./", "../")) or text in (".", ".."):
        return os.path.abspath(path.parent / text)
    return os.path.expanduser(text)
