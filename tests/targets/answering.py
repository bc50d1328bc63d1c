"""A stand-in for a run's supervisor and the command beside a worker: repeats its input until that ends."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.runs.folder import RunFolder
from paceline.system.files import read_json, write_json


class Answering:
    """requests: the received requests. heard: the received data, with "gone" if the folder disappeared."""

    def __init__(self, folder: RunFolder) -> None:
        self.requests: list[dict[str, Any]] = []
        self.heard: list[dict[str, Any]] = []
        self._folder, self._done = folder, threading.Event()
        self._threads = [threading.Thread(target=self._look)]
        self._threads[0].start()

    def close(self) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _look(self) -> None:
        seen = set()
        while not self._done.wait(0.01):
            names: list[str] = []
            with contextlib.suppress(OSError):
                names = os.listdir(self._folder.exec_requests)
            for path in map(self._folder.exec_requests.joinpath, names):
                if path.name not in seen and not path.name.startswith("."):
                    seen.add(path.name)
                    self._threads.append(threading.Thread(target=self._answer, args=(path,)))
                    self._threads[-1].start()

    def _answer(self, path: Path) -> None:
        request = read_json(path / "request.json")
        assert request is not None
        self.requests.append(request)
        if request["argv"] == ["refused"]:
            write_json(path / "answer.json", {"error": "rank 0 has ended"})
            return
        name = f"attempts/1/exec_{path.name}.jsonl"
        output = self._folder.path / name
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(output, "wb", buffering=0) as file:
            write_json(path / "answer.json", {"output": name})
            self._say_back(path, file)
        while path.exists() and not self._done.wait(0.01):
            pass
        output.unlink()

    def _say_back(self, path: Path, file: Any) -> None:
        count = 0
        while not self._done.wait(0.005):
            if not path.exists():
                self.heard.append({"gone": True})
                return
            with contextlib.suppress(FileNotFoundError):
                told = json.loads((path / f"in_{count}.json").read_text())
                count += 1
                self.heard.append(told)
                if "data" in told:
                    file.write(json.dumps({"out": told["data"]}).encode() + b"\n")
                if told.get("end"):
                    file.write(json.dumps({"exit": 3}).encode() + b"\n")
                    return


@contextlib.contextmanager
def answering(folder: RunFolder) -> Iterator[Answering]:
    found = Answering(folder)
    try:
        yield found
    finally:
        found.close()
