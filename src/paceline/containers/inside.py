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
            # An empty part of PATH would mean the working directory.
            environment["PATH"] = os.pathsep.join(part for part in (value, environment.get("PATH", os.defpath)) if part)
    homes = [value for option, value in pairs if option == "--home"]
    # A HOME that the user has set is taken as it is, even if it can't be written to.
    if SET + "HOME" not in os.environ and homes:
        environment["HOME"] = home(environment.get("HOME", "/"), homes)
    try:
        # In its place, not as a child: signals and the exit code are then the command's own.
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.stderr.write("paceline: {!r} could not be started in the container: {}\n".format(command[0], error))
        # As shells do it. `start_failure` reads it as a program that the image does not have.
        sys.exit(127)


def given(environment: "dict[str, str]") -> "dict[str, str]":
    """The environment with the variables under their own names, and the prefixed ones gone."""
    # Over a copy of the names, for the loop takes some out.
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
    # "/" is what engines set for a user whom the image's /etc/passwd does not have.
    if images != "/" and os.path.isdir(images) and os.access(images, os.W_OK | os.X_OK):
        return images
    for top in others:
        path = os.path.join(top, "home-{}".format(os.getpid()))
        try:
            # Fails where the name is taken, so the folder is never one that somebody else has made.
            os.mkdir(path, 0o700)
        except OSError:
            continue
        return path
    return images


def probe() -> None:
    # Imported here alone: every worker's start runs this file, and needs none of them.
    import json
    import shutil
    import subprocess

    # Images made with conda may have mpirun beside the interpreter only, and PATH set by an activation that does not happen
    # here.
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
    # On a line of its own, even if what was printed before it did not end one.
    sys.stdout.write("\n{}{}\n".format("paceline-probe:", json.dumps(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
