"""The first thing that runs in a container: set the environment, then become the command.

    python3 -I -S .../paceline/containers/inside.py [--path DIR] [--home DIR ...] -- command [argument ...]
    python3 -I -S .../paceline/containers/inside.py --probe
    python3 -I -S .../paceline/containers/inside.py --hold

Variables come under names with a prefix, `_PACELINE_SET_<name>` and `_PACELINE_DEFAULT_<name>` (where the image has none
of its own): under their own names they would have to stand in the environment of the engine's client, and a PATH,
HOME or DOCKER_HOST that is meant for the script would be the client's.

--path: put first on PATH. --home: where to make HOME, tried in turn, if the image's can't be written to.
--probe: print as JSON which Python this is, and which mpirun the image has. --hold: do nothing until it is ended.

Written for any Python 3, so that one that is too old can say so.
"""
# ruff: noqa: UP032 - f-strings would be a syntax error before 3.6

import os
import sys

SET, DEFAULT = "_PACELINE_SET_", "_PACELINE_DEFAULT_"


def main(argv: "list[str]") -> None:
    if argv == ["--probe"]:
        probe()
        return
    if argv == ["--hold"]:
        import signal

        # The process that holds /dev/shm open for others; any signal without a handler ends it.
        while True:
            signal.pause()
    end = argv.index("--")
    options, command = argv[:end], argv[end + 1 :]
    pairs = list(zip(options[::2], options[1::2]))  # noqa: B905 - strict= is of 3.10
    environment = given(dict(os.environ))
    for option, value in pairs:
        if option == "--path":
            environment["PATH"] = os.pathsep.join(part for part in (value, environment.get("PATH", os.defpath)) if part)
    homes = [value for option, value in pairs if option == "--home"]
    if SET + "HOME" not in os.environ and homes:
        environment["HOME"] = home(environment.get("HOME", "/"), homes)
    try:
        # In its place, not as a child: signals and the exit code are then the command's own.
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.stderr.write("paceline: {!r} could not be started in the container: {}\n".format(command[0], error))
        sys.exit(127)


def given(environment: "dict[str, str]") -> "dict[str, str]":
    """The environment with the variables under their own names, and the prefixed ones gone."""
    for name in list(environment):
        if name.startswith(DEFAULT):
            environment.setdefault(name[len(DEFAULT) :], environment.pop(name))
    # After the defaults, so that a value that was given wins over one that the image or a default has.
    for name in list(environment):
        if name.startswith(SET):
            environment[name[len(SET) :]] = environment.pop(name)
    return environment


def home(images: str, others: "list[str]") -> str:
    """The image's HOME if the user can write there, else a new folder in the first of the others that takes one.

    It goes with the container: what libraries cache there neither fills the run's folder nor is mixed up with what
    they keep for the host's interpreters.
    """
    if images != "/" and os.path.isdir(images) and os.access(images, os.W_OK | os.X_OK):
        return images
    for top in others:
        path = os.path.join(top, "home-{}".format(os.getpid()))
        try:
            os.mkdir(path, 0o700)
        except OSError:
            continue
        return path
    return images


def probe() -> None:
    import json
    import shutil
    import subprocess

    beside = os.path.join(os.path.dirname(os.path.abspath(sys.executable or "")), "mpirun")
    mpirun, text = shutil.which("mpirun") or shutil.which(beside), ""
    if mpirun:
        try:
            text = subprocess.check_output([mpirun, "--version"], stderr=subprocess.STDOUT).decode("utf-8", "replace")
        except (OSError, subprocess.CalledProcessError) as error:
            text = str(error)
    found = {
        "version": list(sys.version_info[:3]),
        "executable": sys.executable,
        "mpirun": mpirun,
        "mpirun_version": text,
        "uid": os.getuid(),
    }
    sys.stdout.write("\n{}{}\n".format("paceline-probe:", json.dumps(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
