"""Translate the user's pip configuration, from files and `PIP_*` variables, for uv.

Values may contain credentials, so uv gets them through its environment, never on a command line.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from paceline.environments.requirements import RequirementLine
from paceline.job.secret_values import credentials_in, encoded, with_encoded_user
from paceline.system import processes

#: Settings of pip that do not change what is installed.
_WITHOUT_EFFECT = frozenset(
    {
        *("break-system-packages", "cache-dir", "compile", "disable-pip-version-check", "exists-action", "format"),
        *("log", "no-clean", "no-color", "no-compile", "no-input", "no-python-version-warning", "no-warn-conflicts"),
        *("progress-bar", "no-warn-script-location", "quiet", "require-virtualenv", "root-user-action", "src"),
        *("user", "verbose", "debug", "resume-retries", "upgrade-strategy", "version", "editable", "use-pep517"),
        *("dry-run", "report", "help"),
        # These settings choose the destination, which Paceline sets itself for uv and pip.
        *("target", "prefix", "root", "python"),
    }
)
_FLAGS = {
    "pre": {"UV_PRERELEASE": "allow"},
    "require-hashes": {"UV_REQUIRE_HASHES": "1"},
    "no-cache-dir": {"UV_NO_CACHE": "1"},
}
_KEYRINGS = {"disabled": {}, "auto": {}, "subprocess": {"UV_KEYRING_PROVIDER": "subprocess"}}
_TRUE = ("1", "true", "yes", "on", "y", "t")
_FALSE = ("0", "false", "no", "off", "n", "f", "")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")


@dataclass(kw_only=True)
class PipSettings:
    """The user's pip configuration, with the options of a requirements file.

    for_pip: The reason why only pip, not uv, can be used with these settings; "" if uv can be used too.
    """

    values: dict[str, list[str]] = field(default_factory=dict)
    for_pip: str = ""

    def add(self, lines: Iterable[RequirementLine]) -> None:
        """Add the options of a requirements file to the configuration, as pip does."""
        for line in lines:
            value = _filled_in(line.value)
            match (line.option or "").lstrip("-"):
                case "index-url":
                    # --index-url replaces all configured indexes, including those of --extra-index-url.
                    self.values |= {"index-url": [value], "extra-index-url": []}
                case "no-index":
                    self.values |= {"no-index": ["1"], "index-url": [], "extra-index-url": []}
                case "pre" | "require-hashes" | "prefer-binary" | "build-constraint" as name:
                    self.values[name] = [value or "1"]
                case (
                    "extra-index-url"
                    | "find-links"
                    | "trusted-host"
                    | "no-binary"
                    | "only-binary"
                    | "use-feature" as name
                ):
                    self.values[name] = [*self.values.get(name, []), value]

    def uv_variables(self) -> dict[str, str]:
        """Return the pip settings as uv's environment variables.

        If uv has no variable for a setting, set `for_pip`.
        """
        # Let uv take the best version from all indexes, as pip does. By default, uv takes the first index that has the package.
        variables: dict[str, str] = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
        for name, values in self.values.items():
            if values and name not in _WITHOUT_EFFECT:
                variables |= self._translated(name, values)
        return variables

    @property
    def no_index(self) -> bool:
        """Whether pip uses only `find-links`, and no index."""
        value = (self.values.get("no-index") or ["0"])[-1]
        return self._flag("no-index", value)

    def secrets(self) -> list[str]:
        """Return the user names, passwords and tokens that logs must not show."""
        parts = [secret for values in self.values.values() for secret in credentials_in(" ".join(values))]
        return [*parts, *map(unquote, parts)]

    def _translated(self, name: str, values: list[str]) -> dict[str, str]:
        value = values[-1]
        match name:
            case "index-url":
                return {"UV_DEFAULT_INDEX": value}
            case "extra-index-url":
                # pip treats a missing folder as an empty index, and uv does not.
                return {"UV_INDEX": " ".join(each for each in values if _is_there(each))}
            case "find-links":
                there = [each for each in values if _is_there(each)]
                if any("," in each for each in there):
                    self.for_pip = "find-links has a comma"
                return {"UV_FIND_LINKS": ",".join(there)} if there else {}
            case "no-index":
                return {}  # uv has a command line option for this setting, and no variable
            case "trusted-host":
                return {"UV_INSECURE_HOST": " ".join(values)}
            case "cert":
                return {"SSL_CERT_FILE": value}
            case "client-cert":
                return {"SSL_CLIENT_CERT": value}
            case "proxy":
                return dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), value)
            case "timeout" | "default-timeout" if re.fullmatch(r"\d+(\.\d+)?", value):
                # uv takes only whole seconds.
                return {"UV_HTTP_TIMEOUT": str(max(1, int(float(value))))}
            case "retries" if value.isdecimal():
                return {"UV_HTTP_RETRIES": value}
            case "pre" | "require-hashes" | "no-cache-dir":
                return _FLAGS[name] if self._flag(name, value) else {}
            case "no-deps" if not self._flag(name, value):
                return {}
            # uv splits the variable at spaces, so a path with a space can't be passed.
            case "constraint" | "build-constraint" if not any(" " in each for each in values):
                return {f"UV_{name.upper().replace('-', '_')}": " ".join(values)}
            case "only-binary" | "no-binary":
                return self._binary(name, values)
            case "keyring-provider" if value in _KEYRINGS:
                return _KEYRINGS[value]
            case "use-feature" if set(values) <= {"fast-deps", "truststore"}:
                return {"UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"} if "truststore" in values else {}
            case _:
                return self._no(name)

    def _binary(self, name: str, values: list[str]) -> dict[str, str]:
        packages = [each for value in values for each in re.split(r"[,\s]+", value) if each]
        variable = {"no-binary": "UV_NO_BINARY", "only-binary": "UV_NO_BUILD"}[name]
        if packages == [":all:"]:
            return {variable: "1"}
        if any(each.startswith(":") for each in packages):
            return {} if packages[-1] == ":none:" else self._no(name)
        return {f"{variable}_PACKAGE": " ".join(packages)}

    def _flag(self, name: str, value: str) -> bool:
        if value.lower() not in (*_TRUE, *_FALSE):
            self._no(name)
        return value.lower() in _TRUE

    def _no(self, name: str) -> dict[str, str]:
        self.for_pip = self.for_pip or f"pip's setting {name} has no counterpart in uv"
        return {}


def read(environment: Mapping[str, str]) -> PipSettings:
    """Read the settings that pip uses with this process's interpreter."""
    # Run `pip config list`, which takes 0.3 s, only if configuration files exist. Otherwise pip's variables are enough.
    if not _has_files(environment):
        return PipSettings(values=_merged({":env:": _variables(environment)}))
    words = [sys.executable, "-m", "pip", "config", "list"]
    done = processes.said_by(words, timeout_s=60, environment=environment, cwd="/")
    if done.returncode != 0:
        return PipSettings(for_pip="`pip config list` fails, so only pip can say what is wrong with its configuration")
    return PipSettings(values=parse(done.stdout))


def parse(listed: str) -> dict[str, list[str]]:
    """Parse the output of `pip config list`.

    Section `install` overrides `global`; variables override both sections.
    """
    sections: dict[str, dict[str, list[str]]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        left, equals, right = line.partition("=")
        section, dot, name = left.partition(".")
        if not equals or not dot or section not in sections:
            continue
        try:
            # pip prints each value as a Python literal.
            value = ast.literal_eval(right)
        except (ValueError, SyntaxError):
            continue
        # pip separates the items of a list by line breaks or spaces, and does not allow a space in a path either.
        values = with_encoded_user(str(value)).split()
        if values:
            sections[section][name.replace("_", "-")] = values
    return _merged(sections)


def _variables(environment: Mapping[str, str]) -> dict[str, list[str]]:
    return {
        name[len("PIP_") :].lower().replace("_", "-"): values
        for name, value in environment.items()
        if name.startswith("PIP_") and (values := with_encoded_user(value).split())
    }


def _merged(sections: Mapping[str, Mapping[str, list[str]]]) -> dict[str, list[str]]:
    merged: dict[str, list[str]] = {}
    for section in ("global", "install", ":env:"):
        merged |= sections.get(section, {})
    if "timeout" not in merged and "default-timeout" in merged:
        merged["timeout"] = merged.pop("default-timeout")
    merged.pop("default-timeout", None)
    merged.pop("config-file", None)
    return merged


def _has_files(environment: Mapping[str, str]) -> bool:
    if named := environment.get("PIP_CONFIG_FILE"):
        # If PIP_CONFIG_FILE names the null device, pip reads no file: https://pip.pypa.io/en/stable/topics/configuration/.
        return named != os.devnull
    home = os.path.expanduser("~")
    folders = [
        *(os.path.join(each, "pip") for each in (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")),
        *("/etc", "/Library/Application Support/pip", sys.prefix, os.path.join(home, ".pip")),
        os.path.join(environment.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"), "pip"),
        os.path.join(home, "Library", "Application Support", "pip"),
    ]
    return any(os.path.exists(os.path.join(folder, "pip.conf")) for folder in folders)


def _is_there(link: str) -> bool:
    path = unquote(urlsplit(link).path) if link.startswith("file:") else link
    return ("://" in link and not link.startswith("file:")) or os.path.exists(os.path.expanduser(path))


def encoded_variables(text: str, environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Percent-encode variables `${NAME}` that are user names or passwords in URLs.

    Return the text with new names for these variables, and {new name: encoded value}.
    """
    added: dict[str, str] = {}

    def renamed(found: re.Match[str]) -> str:
        value = environment.get(found[1], "")
        _, begins, before = text[: found.start()].rpartition("://")
        in_user = begins and "/" not in before and "@" in text[found.end() :].partition("/")[0]
        if not in_user or encoded(value) == value:
            return found[0]
        added[f"PACELINE_URL_{found[1]}"] = encoded(value)
        return f"${{PACELINE_URL_{found[1]}}}"

    return _VARIABLE.sub(renamed, text), added


def _filled_in(text: str) -> str:
    text, added = encoded_variables(text, os.environ)
    values = {**os.environ, **added}
    return _VARIABLE.sub(lambda found: values.get(found[1], found[0]), text)
