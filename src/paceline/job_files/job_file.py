"""Read job files (`paceline run job.yaml`) and write them (`--dry-run --yaml`).

Paceline converts each value by the rules of its key, not of YAML: `3.10` can be a version, and `no` a text.
`node_count` is a number, `use_gpu` is true or false, and a duration has the forms of `--max-duration`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError
from paceline.estimator import argument_words
from paceline.job.secret_values import looks_secret
from paceline.job.sizes import node_range, range_text
from paceline.job_files.data_words import absolute_word
from paceline.job_files.description import combined
from paceline.job_files.parameters import escaped, fill
from paceline.system import units

if TYPE_CHECKING:
    from yaml import Node

_COUNT, _NODES, _FLAG, _SECONDS, _TEXT, _PATH, _TEXTS, _PATHS, _PAIRS = (
    "a number",
    "a number, or the fewest and the most as in 2..4",
    "true or false",
    "a duration",
    "a word",
    "a path",
    "a list",
    "a list of paths",
    "a mapping",
)
#: Key of a job file -> kind of its value. A written file has the keys in this order.
KEYS = {
    "experiment": _TEXT,
    "display_name": _TEXT,
    "entry_script": _TEXT,
    "entry_module": _TEXT,
    "working_directory": _TEXT,
    "arguments": _TEXTS,
    "script_params": _PAIRS,
    "source_directory": _PATH,
    "link": _PATHS,
    "send": _PATHS,
    "compute_target": _TEXT,
    "node_count": _NODES,
    "process_count_per_node": _COUNT,
    "worker_count": _COUNT,
    "parameter_server_count": _COUNT,
    "distributed_backend": _TEXT,
    "use_gpu": _FLAG,
    "gpu_visibility": _TEXT,
    "gpu_share": _TEXT,
    "priority": _TEXT,
    "cores": _COUNT,
    "environment_variables": _PAIRS,
    "secrets": _PAIRS,
    "env_file": _PATHS,
    "inputs": _TEXTS,
    "outputs": _TEXTS,
    "python": _PATH,
    "pip_packages": _TEXTS,
    "pip_requirements_file": _PATH,
    "conda_packages": _TEXTS,
    "conda_channels": _TEXTS,
    "conda_dependencies_file": _PATH,
    "layered": _FLAG,
    "environment_definition": _TEXT,
    "custom_docker_image": _TEXT,
    "shm_size": _TEXT,
    "max_run_duration_seconds": _SECONDS,
    "grace_period_seconds": _SECONDS,
    "max_restarts": _COUNT,
    "on_failure": _TEXT,
    "restart_on_exception": _FLAG,
    "log_limit": _TEXT,
    "notify": _TEXTS,
    "notify_on": _TEXTS,
    "hang_seconds": _SECONDS,
    "on_hang": _TEXT,
    "warm": _TEXT,
    "elastic_seconds": _SECONDS,
    "tags": _PAIRS,
}
#: Option of Paceline, or setting of another program -> the key to suggest instead, for names too different for difflib.
OPTIONS = {
    "backend": "distributed_backend",
    "ps": "parameter_server_count",
    "name": "display_name",
    "compute": "compute_target",
    "gpu": "use_gpu",
    "pip": "pip_packages",
    "conda": "conda_packages",
    "conda_file": "conda_dependencies_file",
    "channel": "conda_channels",
    "environment": "environment_definition",
    "image": "custom_docker_image",
    "output": "outputs",
    "max_duration": "max_run_duration_seconds",
    "grace": "grace_period_seconds",
    "hang_after": "hang_seconds",
    "elastic_after": "elastic_seconds",
    **dict.fromkeys(("script", "command", "program"), "entry_script"),
    "module": "entry_module",
    "args": "arguments",
    "source": "source_directory",
    "target": "compute_target",
    "nodes": "node_count",
    **dict.fromkeys(("processes", "nproc_per_node"), "process_count_per_node"),
    "gpus": "use_gpu",
    **dict.fromkeys(("env", "variables"), "environment_variables"),
    "requirements": "pip_requirements_file",
}


def read(
    path: Path,
    sections: Collection[str] = (),
    *,
    text: str | None = None,
    parameters: Mapping[str, str] | None = None,
    offered: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the values in a job file, by parameter name.

    Relative paths start from the file's folder, which is the default source folder. `sections` are further allowed
    keys, such as "sweep". `text`, if given, is read instead of the file. `parameters` are values for the file's
    parameters, and `offered` are more values, of parameters that the file may lack. `arguments` replace the file's.
    """
    node = composed(path, text)
    fill(path, node, parameters or {}, offered, () if arguments is None else ("script_params", "arguments"))
    found = of_node(path, node, sections)
    if arguments is not None:
        found["arguments"] = [*arguments]
    found.setdefault("source_directory", str(path.parent))
    return found


def under(file: Path, options: Mapping[str, Any], sections: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a job file or template, overridden by `options`.

    `options` are values from the command line. `sections` are further keys that the file may have, such as "sweep".
    """
    above = dict(options)
    text, parameters = above.pop("text", None), above.pop("parameters", None)
    found = read(file, sections, text=text, parameters=parameters, arguments=above.get("arguments"))
    return combined(found, above)


def composed(path: Path, text: str | None = None) -> Any:
    """Parse a job file to a PyYAML mapping node."""
    import yaml

    try:
        # Compose instead of load: nodes keep the spelling of values (3.10, no) and their line numbers.
        node = yaml.compose(path.read_text(encoding="utf-8") if text is None else text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise JobError(f"{str(path)!r} can't be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        hint = ' A ${...} inside of [ ] or { } needs quotes: "${lr:0.1}".' if "${" in (text or _text_of(path)) else ""
        raise JobError(f"{str(path)!r} is not YAML: {' '.join(str(error).split())}.{hint}") from None
    if not isinstance(node, yaml.MappingNode):
        raise JobError(f"{str(path)!r} is not a job. Write keys and values, such as `entry_script: train.py`.")
    return node


def _text_of(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")


def of_node(path: Path, node: Any, sections: Collection[str] = ()) -> dict[str, Any]:
    """Convert a job file's YAML mapping `node` to a dict, without defaults.

    Also accept the keys in `sections`. If a variable looks like a secret, "leave_out" names the file: snapshots omit it.
    """
    import yaml

    # Take the keys in `sections` out, because `_Reader` does not know them. YAML's own rules apply to their values.
    further = {key.value: value for key, value in node.value if key.value in sections}
    node.value = [(key, value) for key, value in node.value if key.value not in sections]
    found = _Reader(path, sections).job(node)
    # Use the safe loader, so that tags in a file can't create objects.
    loader = yaml.SafeLoader("")
    found |= {key: loader.construct_object(value, deep=True) for key, value in further.items()}
    if "script_params" in found:
        # In YAML, the flag `--verbose:` without a value is None, while script_params marks a flag by "".
        params = {name: "" if value is None else value for name, value in found.pop("script_params").items()}
        found["arguments"] = [*argument_words(params, found.get("arguments"))]
    if any(looks_secret(name, value) for name, value in found.get("environment_variables", {}).items()):
        found["leave_out"] = [str(path)]
    return found


def text(description: Mapping[str, Any]) -> str:
    """Return a job description as a job file's text, without the secrets' values."""
    import yaml

    # Write texts in double quotes if needed: only this style keeps line breaks and other control characters.
    dumper: Any = type("Dumper", (yaml.SafeDumper,), {})
    dumper.add_representer(
        str,
        lambda own, value: own.represent_scalar(
            "tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"'
        ),
    )
    values = {key: escaped(description[key]) for key in KEYS if key in description}
    # Set a very large width: PyYAML would break a long text over several lines.
    return str(yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True, width=1000))


class _Reader:
    def __init__(self, path: Path, sections: Collection[str] = ()) -> None:
        self._path = path
        self._known = (*KEYS, *sections)
        self._kinds: dict[str, Callable[[str, Node], Any]] = {
            _COUNT: self._count,
            _NODES: self._nodes,
            _FLAG: self._flag,
            _SECONDS: self._seconds,
            _TEXT: self._text,
            _PATH: lambda key, node: self._absolute(key, self._text(key, node)),
            _TEXTS: self._texts,
            _PATHS: lambda key, node: [self._absolute(key, one) for one in self._texts(key, node)],
            _PAIRS: self._pairs,
        }

    def job(self, node: Node) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value in node.value:
            key = str(key_node.value)
            if key not in KEYS:
                word = key.lower().replace("-", "_")
                close = [OPTIONS[word]] if word in OPTIONS else difflib.get_close_matches(key, self._known, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise self._error(key_node, f"unknown key {key!r}.{hint} Known are {', '.join(self._known)}.")
            # Refuse duplicate keys: YAML's own readers silently take the last one.
            if key in found:
                raise self._error(key_node, f"{key} is given twice.")
            if self._is_null(value):
                continue  # treat an empty value like a missing key
            found[key] = self._kinds[KEYS[key]](key, value)
        return found

    def _text(self, key: str, node: Node) -> str:
        if not isinstance(node.value, str) or self._is_null(node):
            raise self._error(node, f"{key} takes {KEYS[key]} here.")
        return node.value

    def _count(self, key: str, node: Node) -> int:
        word = self._text(key, node)
        # Check for ASCII digits: isdecimal() is also True for other digits, such as Arabic ones.
        if not (word.isascii() and word.isdecimal()):
            raise self._error(node, f"{key}: {word!r} is not a number.")
        return int(word)

    def _nodes(self, key: str, node: Node) -> int | str:
        if not isinstance(node.value, str):
            ends = [one.value for one in node.value if isinstance(getattr(one, "value", None), str)]
            word = "..".join(ends) if len(ends) == len(node.value) == 2 else ""
        else:
            word = self._text(key, node)
        if re.fullmatch(r"[0-9]+", word):
            return int(word)
        if ".." not in word:
            what = f"{key}: {word!r} is not a number." if word else f"{key} takes {KEYS[key]}."
            raise self._error(node, what)
        try:
            least, most = node_range(word)
        except JobError as error:
            raise self._error(node, str(error)) from None
        return range_text(least, most)

    def _flag(self, key: str, node: Node) -> bool:
        word = self._text(key, node)
        # Accept only true and false: YAML 1.1 reads `yes` and `on` as true, but YAML 1.2 reads them as texts.
        if word.lower() not in ("true", "false"):
            raise self._error(node, f"{key}: {word!r} is neither true nor false.")
        return word.lower() == "true"

    def _seconds(self, key: str, node: Node) -> float:
        try:
            return units.seconds(self._text(key, node))
        except ValueError as error:
            raise self._error(node, f"{key}: {error}") from None

    def _texts(self, key: str, node: Node) -> list[str]:
        if isinstance(node.value, str):
            if KEYS[key] == _PATHS:
                return [self._text(key, node)]
            raise self._error(node, f"{key} takes a list. Begin each with `- `.")
        # A list's entries are nodes. A mapping's entries are pairs of nodes, which are refused below.
        found = [self._text(key, one) for one in node.value if not isinstance(one, tuple)]
        if len(found) < len(node.value):
            raise self._error(node, f"{key} takes a list. Begin each with `- `.")
        if key == "inputs":
            return [absolute_word(f"{key}:", word, self._path.parent) for word in found]
        return found

    def _pairs(self, key: str, node: Node) -> dict[str, Any]:
        # In a list of names, each secret comes from the variable with its own name.
        if key == "secrets" and (names := self._names(node)):
            return {name: f"env:{name}" for name in names}
        if isinstance(node.value, str) or not all(isinstance(one, tuple) for one in node.value):
            raise self._error(node, f"{key} takes names and values, a line each, such as `NAME: value`.")
        found: dict[str, Any] = {}
        for name_node, value in node.value:
            name = self._text(key, name_node)
            if name in found:
                raise self._error(name_node, f"{key} has {name} twice.")
            # Refuse an empty value, because the user has probably forgotten the value.
            if self._is_null(value) and key == "environment_variables":
                raise self._error(value, f'{key}: {name} has no value. Write "" for an empty one.')
            found[name] = None if self._is_null(value) else self._text(key, value)
            if key == "secrets" and found[name] is None:
                found[name] = f"env:{name}"
        return found

    @staticmethod
    def _names(node: Node) -> list[str]:
        if isinstance(node.value, str) or not all(isinstance(getattr(one, "value", None), str) for one in node.value):
            return []
        return [one.value for one in node.value]

    def _absolute(self, key: str, given: str) -> str:
        expanded = os.path.expanduser(given)
        # As in a shell, a command without a slash is looked up on PATH.
        if key == "python" and os.sep not in expanded:
            return given  # a command without a slash, which is looked up on PATH
        return os.path.normpath(os.path.join(self._path.parent, expanded))

    @staticmethod
    def _is_null(node: Node) -> bool:
        return bool(node.tag == "tag:yaml.org,2002:null")

    def _error(self, node: Node, what: str) -> JobError:
        return JobError(f"{str(self._path)!r}, line {node.start_mark.line + 1}: {what}")
