"""Create an environment and run pip in it, inside a container, with the image's Python.

    python3 .../paceline/containers/layer_inside.py PREFIX PIP RESULT pip's arguments ...

PREFIX: path of the environment. PIP: folder of the package pip, because the image may have no pip. RESULT: path of the JSON
file to write, with the installed names and versions.

A `.pth` file makes the environment see the packages of the image's Python. The venv option `system_site_packages` can't do
this if the image's Python is itself in a venv: the option would show only the packages of that venv's base interpreter.
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
    # Use Paceline's pip: many images lack ensurepip. Use symlinks: a copied interpreter might not find its libraries.
    venv.EnvBuilder(symlinks=True, with_pip=False).create(prefix)
    python = os.path.join(prefix, "bin", "python")
    own = _site_packages(python)
    with open(os.path.join(own, "_paceline_image.pth"), "w") as file:
        # Python's `site` module runs an `import` line of a .pth file. `addsitedir` reads the .pth files of the image's folders.
        for folder in _of_this_python():
            file.write(f"import site; site.addsitedir({folder!r})\n")
    # Because of the .pth file above, pip treats the image's packages as installed, and adds only missing packages.
    code = subprocess.call([python, pip, *arguments])
    if code != 0:
        return code
    from importlib import metadata

    # List only the environment's own folder, because the image's packages are not part of the layer.
    versions = sorted({f"{each.metadata['Name']}=={each.version}" for each in metadata.distributions(path=[own])})
    with open(result, "w") as file:
        json.dump({"packages": versions}, file)
    return 0


def _site_packages(python: str) -> str:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.check_output([python, "-I", "-c", code], text=True).strip()


def _of_this_python() -> list[str]:
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
