"""`python -m tests.worlds --seed 7`: repeat a world. `--seeds 1000 --from 1`: run many, and print those that break a rule."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import pkgutil
import shutil
import sys
import traceback
from pathlib import Path

from tests.worlds.disks import _os


def _loaded():
    """Return the kernel and disks, once the simulation has replaced the clocks, and Paceline is loaded."""
    import concurrent.futures
    import ctypes
    import http.client
    import multiprocessing  # noqa: F401

    from tests.worlds import patches
    from tests.worlds.kernel import Kernel

    del concurrent, ctypes, http
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]  # its copies would have the real time
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    kernel = Kernel(0)
    disks = patches.install(kernel, "/nowhere")
    from tests.worlds import machines

    machines.install(kernel)
    # Load the modules that runs import late, once for all simulated worlds.
    for package in ("supervisor", "runs", "remote", "observe.node", "job", "launchers", "system"):
        found = importlib.import_module(f"paceline.{package}")
        for module in pkgutil.walk_packages(found.__path__, f"paceline.{package}."):
            if not module.name.endswith("__main__") and ".search" not in module.name:
                importlib.import_module(module.name)
    importlib.import_module("tests.worlds.checks")
    for name in (
        "observe.hang_watch",
        "observe.stacks",
        "observe.wait_graph",
        "observe.load_watch",
        "targets.configured",
    ):
        importlib.import_module(f"paceline.{name}")
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.stdout = patches.Output()
    return kernel, disks


def _outcome(kernel, disks, root: Path, seed: int, *, keeps_events: bool = False):
    """Simulate a world. Return its result as JSON values."""
    from tests.worlds import checks, world

    error = None
    found = None
    try:
        found = world.simulate(kernel, disks, root, seed, keeps_events=keeps_events)
    except BaseException:
        error = traceback.format_exc()
    broken = [f"the simulation failed: {error}"] if error else checks.broken_rules(found)
    result = {"seed": seed, "trace": kernel.trace, "events": kernel.events, "now": kernel.now, "broken": broken}
    if keeps_events:
        lines = list(kernel.kept or ())
        for process, name, raised in kernel.uncaught:
            lines += [f"uncaught in {process}/{name}:", *"".join(traceback.format_exception(raised)).splitlines()]
        if found is not None:
            lines += [f"home: {at_s:.3f} {what}" for at_s, what in found.happened]
            lines += [str(found.job), f"shared {found.cluster.is_shared} silence {found.silence_s} {vars(found.plan)}"]
            lines += [str(record) for _, record in found.seen[0].records[-1:]]
            if found.folder.driver_log.exists():
                lines += found.folder.driver_log.read_text().splitlines()
        result["lines"] = lines
    return result


class _Child:
    """A child process that simulates one world."""

    def __init__(self, kernel, disks, top: Path, seed: int, **values) -> None:
        self._fd, writing = _os["pipe"]()
        self._folder = top / str(seed)
        sys.__stdout__.flush()
        self._pid = _os["fork"]()
        if self._pid == 0:
            try:
                data = json.dumps(_outcome(kernel, disks, self._folder, seed, **values)).encode()
            except BaseException:
                data = json.dumps({"seed": seed, "trace": 0, "broken": [traceback.format_exc()]}).encode()
            while data:
                data = data[_os["write"](writing, data) :]
            os._exit(0)
        _os["close"](writing)

    def result(self):
        """Wait for the end of the world. Return its result, with the CPU seconds that it took."""
        data = b""
        while piece := _os["read"](self._fd, 1 << 16):
            data += piece
        _os["close"](self._fd)
        _, _, usage = _os["wait4"](self._pid, 0)
        shutil.rmtree(self._folder, ignore_errors=True)
        return {**json.loads(data), "cpu_s": usage.ru_utime + usage.ru_stime}


def _sabotage(name: str) -> None:
    """Build the fault `name` into Paceline, to see whether the rules find it."""
    from paceline.remote.replica.changes import Changes
    from paceline.runs import store
    from paceline.runs.claim import Claim
    from paceline.supervisor.supervision import Supervision

    growth, write = Changes._growth, store.write
    sabotages = {
        "lost lines": lambda: setattr(
            Changes, "_growth", lambda self, name: (frame for frame in growth(self, name) if b"step 3" not in frame[1])
        ),
        "lost ends": lambda: setattr(Supervision, "close_attempt", lambda self, outcome: None),
        "lost records": lambda: setattr(
            store, "write", lambda folder, record: None if record.is_terminal else write(folder, record)
        ),
        "lost claims": lambda: setattr(Claim, "is_lost", lambda self: False),
    }
    sabotages[name]()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.worlds", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat the world of this seed, and print its events")
    parser.add_argument("--seeds", type=int, default=0, help="number of worlds to simulate")
    parser.add_argument("--from", type=int, default=0, dest="first", help="their first seed")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--switches", action="store_true", help="print each switch between tasks too")
    parser.add_argument("--fault", default="", help="an engine's fault that each world gets")
    parser.add_argument("--sabotage", help="name of a fault to build into Paceline")
    args = parser.parse_args(argv)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets has to be the same in each repetition.
        os.execve(sys.executable, [sys.executable, "-m", "tests.worlds", *argv], {**os.environ, "PYTHONHASHSEED": "0"})
    say = sys.stdout
    kernel, disks = _loaded()
    importlib.import_module("tests.worlds.world").forced = args.fault  # type: ignore[attr-defined]
    if args.sabotage:
        _sabotage(args.sabotage)
    kernel.is_detailed, failed, total_s = args.switches, 0, 0.0
    top = Path(f"/dev/shm/worlds-{os.getpid()}")
    top.mkdir()
    try:
        if args.seed is not None:
            found = _Child(kernel, disks, top, args.seed, keeps_events=True).result()
            lines = found.pop("lines", [])
            say.write("\n".join(lines) + f"\n{json.dumps(found, indent=1)}\n")
            failed = len(found["broken"])
        children: list[_Child] = []
        seeds = list(range(args.first, args.first + args.seeds))
        while seeds or children:
            while seeds and len(children) < args.jobs:
                children.append(_Child(kernel, disks, top, seeds.pop(0)))
            found = children.pop(0).result()
            total_s += found["cpu_s"]
            if found["broken"]:
                failed += 1
                say.write(f"seed {found['seed']}: " + "; ".join(found["broken"])[:1000] + "\n")
                say.flush()
        if args.seeds:
            say.write(f"{args.seeds} worlds, {failed} broke a rule; {total_s:.1f} CPU seconds\n")
    finally:
        shutil.rmtree(top, ignore_errors=True)
    say.flush()
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
