"""The first program of a pod: it unpacks Paceline's library, checks the image's Python, and runs `pod.py` or a service.

This file and `ticket.json` (the run's description) are in a Secret of the run. Other Secrets have the library's parts.
"""

import importlib
import io
import json
import os
import sys
import zipfile

CODE, LIBRARY = "/etc/paceline/code", "/paceline/lib"


def main() -> int:
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.version_info[:2] < (3, 10):  # noqa: UP036
        found = ".".join(map(str, sys.version_info[:3]))
        print("paceline: the image's Python (%s) is %s, and Paceline needs 3.10 or later" % (sys.executable, found))  # noqa: UP031
        return 70
    with open(os.path.join(here, "ticket.json"), encoding="utf-8") as file:
        ticket = json.load(file)
    digest = ticket["library"]
    library = os.path.join(LIBRARY, digest)
    try:
        if not os.path.isdir(library):
            unpack(library + ".new")
            os.rename(library + ".new", library)
    except OSError as error:
        print("paceline: the library can't be unpacked: " + str(error))
        return 70
    # Replace sys.path[0], which is this file's folder: modules in that folder could hide other modules of the same name.
    sys.path[0] = library
    main = importlib.import_module(ticket.get("program", "paceline.targets.kubernetes.pod")).main
    return int(main(os.path.join(here, "ticket.json"), library))


def unpack(folder: str) -> None:
    parts = sorted((name for name in os.listdir(CODE) if name.startswith("library.")), key=lambda name: int(name[8:]))
    data = b""
    for name in parts:
        with open(os.path.join(CODE, name), "rb") as file:
            data += file.read()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(folder)


if __name__ == "__main__":
    sys.exit(main())
