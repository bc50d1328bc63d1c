"""The first program in a container: set the environment, then exec the command.

    python3 -I -S .../paceline/containers/inside.py [--path DIR] [--home DIR ...] -- command [argument ...]
    python3 -I -S .../paceline/containers/inside.py --probe
    python3 -I -S .../paceline/containers/inside.py --hold

Variables have prefixed names, `_PACELINE_SET_<name>` and `_PACELINE_DEFAULT_<name>` (used if the image has none). Under its own
name, a script's PATH, HOME or DOCKER_HOST would affect the engine's client.

--path: put first on PATH. --home: parents for HOME, tried in turn if the image's is not writable. --probe: print this Python
and the image's mpirun as JSON. --hold: wait to be killed.

Valid in any Python 3, so that one that is too old can report that.
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

        # The process that holds /dev/shm open; any signal without a handler ends it.
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
    # A HOME set by the user is used even if it is not writable.
    if SET + "HOME" not in os.environ and homes:
        environment["HOME"] = home(environment.get("HOME", "/"), homes)
    try:
        # exec, not a child: signals and the exit code are then the command's own.
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.stderr.write("paceline: {!r} could not be started in the container: {}\n".format(command[0], error))
        # As in shells. `start_failure` takes it for a missing program.
        sys.exit(127)


def given(environment: "dict[str, str]") -> "dict[str, str]":
    """Move the prefixed variables to their own names."""
    # Over a copy: the loop removes names.
    for name in list(environment):
        if name.startswith(DEFAULT):
            environment.setdefault(name[len(DEFAULT) :], environment.pop(name))
    # After the defaults, so that a given value takes precedence over an image's or a default.
    for name in list(environment):
        if name.startswith(SET):
            environment[name[len(SET) :]] = environment.pop(name)
    return environment


def home(images: str, others: "list[str]") -> str:
    """Return a writable HOME in the image.

    It goes with the container: caches of libraries neither fill the run's folder nor mix with those of the host's interpreters.
    """
    # Engines set "/" for a user missing in the image's /etc/passwd.
    if images != "/" and os.path.isdir(images) and os.access(images, os.W_OK | os.X_OK):
        return images
    for top in others:
        path = os.path.join(top, "home-{}".format(os.getpid()))
        try:
            # Fails if the name exists, so the folder is never another user's.
            os.mkdir(path, 0o700)
        except OSError:
            continue
        return path
    return images


def probe() -> None:
    # Imported here: every worker's start runs this file without needing them.
    import json
    import shutil
    import subprocess

    # Images made with conda may have mpirun only beside the interpreter, on a PATH that needs an activation.
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
    # On a line of its own, even if earlier output has no final line break.
    sys.stdout.write("\n{}{}\n".format("paceline-probe:", json.dumps(facts)))


if __name__ == "__main__":
    main(sys.argv[1:])
