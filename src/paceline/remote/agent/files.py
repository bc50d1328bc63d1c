"""An agent's requests that are about files on its node."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from paceline.remote.agent.atomic_write import AtomicWrite, census
from paceline.remote.agent.send_queue import SendQueue
from paceline.remote.replica.changes import stamp_of


class FileRequests:
    """Takes files and trees, and answers questions. fail: answers a request with an error."""

    def __init__(self, out: SendQueue, fail: Callable[[int, Exception], None]) -> None:
        self._out, self._fail = out, fail
        self._arrivals: dict[int, AtomicWrite] = {}

    def drop(self) -> None:
        """Leave nothing of what has come in part."""
        for arrival in self._arrivals.values():
            arrival.drop()

    def op_file(self, header: dict[str, Any], data: bytes) -> dict[str, Any]:
        whole = AtomicWrite(header["path"], "replace")
        try:
            # A single file is a tree of one entry, which is its own top.
            entry = {"name": ".", "kind": "file", "mode": header["mode"], "mtime": time.time_ns(), "end": True}
            whole.take(entry, data)
            whole.finish()
        except BaseException:
            whole.drop()
            raise
        return {}

    def op_tree(self, header: dict[str, Any], data: bytes) -> None:
        self._arrivals[header["id"]] = AtomicWrite(header["path"], header["how"])

    def op_entry(self, header: dict[str, Any], data: bytes) -> None:
        request = header["of"]
        arrival = self._arrivals.get(request)
        if arrival is None:
            return  # it has failed, and that was said
        try:
            if header["kind"] == "finish":
                arrival.finish()
                del self._arrivals[request]
                self._out.put({"re": request})
            else:
                arrival.take(header, data)
        except OSError as error:
            del self._arrivals[request]
            arrival.drop()
            self._fail(request, error)

    def op_mkdirs(self, header: dict[str, Any], data: bytes) -> dict[str, Any]:
        for path in header["paths"]:
            os.makedirs(path, mode=header.get("mode", 0o777), exist_ok=True)
        return {}

    def op_link(self, header: dict[str, Any], data: bytes) -> dict[str, Any]:
        # symlink refuses a name that is taken, so the link is made beside it and renamed.
        beside = f"{header['path']}.{os.getpid()}"
        os.symlink(header["target"], beside)
        os.replace(beside, header["path"])
        return {}

    def op_list(self, header: dict[str, Any], data: bytes) -> dict[str, Any]:
        return {"names": sorted(os.listdir(header["path"]))}

    def op_exists(self, header: dict[str, Any], data: bytes) -> dict[str, Any]:
        return {"ok": os.path.lexists(header["path"])}

    def op_sees(self, header: dict[str, Any], data: bytes) -> dict[str, Any]:
        try:
            # Only so much: another file may lie at this path, of any size.
            with open(header["path"], encoding="utf-8") as file:
                return {"ok": file.read(1 << 12) == header["token"]}
        except (OSError, ValueError):
            return {"ok": False}

    def op_inode(self, header: dict[str, Any], data: bytes) -> dict[str, Any]:
        return {"found": os.stat(header["path"]).st_ino if os.path.exists(header["path"]) else 0}

    def op_have(self, header: dict[str, Any], data: bytes) -> dict[str, Any]:
        top = header["path"]
        paths = (os.path.join(directory, name) for directory, _, files in os.walk(top) for name in files)
        return {"found": {os.path.relpath(path, top): stamp_of(path) for path in paths}}

    def op_census(self, header: dict[str, Any], data: bytes) -> dict[str, Any]:
        return {"found": census(header["path"])}
