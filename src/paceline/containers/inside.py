"""Run first in a container: set the environment, then exec the command.

    python3 -I -S .../paceline/containers/inside.py [--path DIR] [--home DIR ...] -- command [argument ...]
    python3 -I -S .../paceline/containers/inside.py --probe
    python3 -I -S .../paceline/containers/inside.py --hold

The command's variables arrive with a prefix, because a PATH, HOME or DOCKER_HOST would affect the engine's client.
`_PACELINE_SET_<name>` sets the variable. `_PACELINE_DEFAULT_<name>` sets it only if the image has no such variable.

--path: put DIR first on PATH. --home: if the image's HOME is not writable, create a new HOME in the first writable DIR.
--probe: print this Python and the image's mpirun as JSON. --hold: wait until a signal ends this process.

This file is valid in any Python 3, so that a Python that is too old can report its version.
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

        # Sleep, because the workers' containers use this container's /dev/shm. Any signal without a handler ends this process.
        while True:
            signal.pause()
    end = argv.index("--")
    options, command = argv[:end], argv[end + 1 :]
    pairs = list(zip(options[::2], options[1::2]))  # noqa: B905 - strict= is of 3.10
    environment = given(dict(os.environ))
    for option, value in pairs:
        if option == "--path":
            # Leave out empty parts of PATH: they would mean the working directory.
            environment["PATH"] = os.pathsep.join(part for part in (value, environment.get("PATH", os.defpath)) if part)
    homes = [value for option, value in pairs if option == "--home"]
    # If the user has set HOME, use it even if it is not writable.
    if SET + "HOME" not in os.environ and homes:
        environment["HOME"] = home(environment.get("HOME", "/"), homes)
    try:
        # Replace this process by exec, so that signals and the exit code are the command's own.
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.stderr.write("paceline: {!r} could not be started in the container: {}\n".format(command[0], error))
        # Exit with the code that shells use for a missing program. Paceline then reports that the program is missing.
        sys.exit(127)


def given(environment: "dict[str, str]") -> "dict[str, str]":
    """Remove Paceline's prefixes from the variables' names in place. Return `environment`."""
    # Iterate over a copy, because the loop changes the dictionary.
    for name in list(environment):
        if name.startswith(DEFAULT):
            environment.setdefault(name[len(DEFAULT) :], environment.pop(name))
    # Apply the job's own values last, because they have priority over the image's values and over defaults.
    for name in list(environment):
        if name.startswith(SET):
            environment[name[len(SET) :]] = environment.pop(name)
    return environment


def home(images: str, others: "list[str]") -> str:
    """Return the image's HOME (`images`) if writable, else a new folder below one of `others`.

    If no folder of `others` is writable, return `images`. Libraries write their caches to HOME. A HOME in the container
    keeps these caches out of the run's folder and apart from the host's caches.
    """
    # Engines set HOME to "/" for a user that the image's /etc/passwd does not have.
    if images != "/" and os.path.isdir(images) and os.access(images, os.W_OK | os.X_OK):
        return images
    for top in others:
        path = os.path.join(top, "home-{}".format(os.getpid()))
        try:
            # `mkdir` fails if the folder exists, so this process never uses a folder of another user.
            os.mkdir(path, 0o700)
        except OSError:
            continue
        return path
    return images


def probe() -> None:
    # Import here what only the examination of an image needs: each worker starts with this file, too.
    import json
    import shutil
    import subprocess

    # In images made with conda, mpirun may be only beside the interpreter, and not on PATH without an activation.
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.executable or "")), "mpirun")
    mpirun, text = shutil.which("mpirun") or shutil.which(beside), ""
    if mpirun:
        try:
            text = subprocess.check_output([mpirun, "--version"], stderr=subprocess.STDOUT).decode("utf-8", "replace")
        except (OSError, subprocess.CalledProcessError) as error:
            text = str(error)
    facts = {
        "version": list(sys.version_info[:3]),
        "executable": sys.executable,
        "mpirun": mpirun,
        "mpirun_version": text,
        "uid": os.getuid(),
    }
    # Begin a new line, in case earlier output has no line break at its end.
    sys.stdout.write("\n{}{}\n".format("paceline-probe:", json.dumps(facts)))


if __name__ == "__main__":
    main(sys.argv[1:])
