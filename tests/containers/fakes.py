"""Stand-ins for engines: programs that answer as podman, docker and apptainer do, and record their command lines."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import write_program

PODMAN = """\
case "$1" in
  --version) echo "podman version 4.3.1";;
  info) echo "false false";;
  version) echo "unknown false";;
  ps) ;;
esac
"""
ROOTLESS_PODMAN = PODMAN.replace("false false", "true false")
REMOTE_PODMAN = PODMAN.replace("false false", "false true").replace("unknown false", "unknown true")
BROKEN_PODMAN = """\
case "$1" in
  --version) echo "podman version 4.3.1";;
  *) echo "Error: runtime 'crun' is not there" >&2; exit 125;;
esac
"""
DOCKER = """\
case "$1" in
  --version) echo "Docker version 28.2.2, build e6534b4";;
  info) echo 'server=20.10.24 ["name=seccomp,profile=default"]';;
esac
"""
ROOTLESS_DOCKER = DOCKER.replace("]'", ',"name=rootless"]\'')
NO_DAEMON = """\
case "$1" in
  --version) echo "Docker version 28.2.2, build e6534b4";;
  info) echo "server= null"; echo "Cannot connect to the Docker daemon. Is it running?" >&2; exit 1;;
esac
"""
#: Old docker clients print the same error, but exit with 0.
OLD_NO_DAEMON = NO_DAEMON.replace("exit 1", "exit 0")
APPTAINER = 'echo "apptainer version 1.3.4"'
SINGULARITY = 'echo "singularity-ce version 4.1.0-1.el9"'
NO_ENGINE = 'echo "Docker is not installed here; see the manual"'


def program(folder: Path, name: str, text: str) -> Path:
    """`<folder>/<name>`, a shell script."""
    return write_program(folder / name, f"#!/bin/sh\n{text}\n")
