"""Runs in a container, with the image's Python: an environment beside the image's own packages, and pip into it.

    python3 .../paceline/containers/layer_inside.py PREFIX PIP RESULT pip's arguments ...

PREFIX: where the environment is made. PIP: the folder of a pip package, which the image need not have.
RESULT: JSON file for the names and versions of what was installed.

A `.pth` file leads from the environment to the packages of this Python. The environment's own switch for that would
lead past an interpreter that is an environment itself, as those of many images are, to the one below it.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import sysconfig


def main(argv: list[str]) -> int:
    prefix, pip, result, *arguments = argv
    try:
        import venv
    except ImportError:
        print("paceline: this Python has no module venv (on Debian: apt-get install python3-venv)", file=sys.stderr)
        return 1
    # Without pip: many images lack ensurepip. Paceline's own pip is run from its folder instead.
    # Links to the image's interpreter: a copy might not find the libraries that lie beside the original.
    venv.EnvBuilder(symlinks=True, with_pip=False).create(prefix)
    python = os.path.join(prefix, "bin", "python")
    own = _site_packages(python)
    with open(os.path.join(own, "_paceline_image.pth"), "w") as file:
        # `site` runs this line at each start. `addsitedir` also follows the .pth files of the image's packages, which a bare
        # path would not.
        for folder in _of_this_python():
            file.write(f"import site; site.addsitedir({folder!r})\n")
    # The environment's Python sees the image's packages, so pip takes what is met by them for installed.
    code = subprocess.call([python, pip, *arguments])
    if code != 0:
        return code
    from importlib import metadata

    # Of the environment's own folder: what the image brings is no part of the layer.
    found = sorted({f"{each.metadata['Name']}=={each.version}" for each in metadata.distributions(path=[own])})
    with open(result, "w") as file:
        json.dump({"packages": found}, file)
    return 0


def _site_packages(python: str) -> str:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.check_output([python, "-I", "-c", code], text=True).strip()


def _of_this_python() -> list[str]:
    """The folders that this Python has its packages in, the user's own left out."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
