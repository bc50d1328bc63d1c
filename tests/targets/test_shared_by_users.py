"""One queue for five Unix users: processes that take leases, and die at any time, and a hostile user among them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.targets import host_leases
from paceline.targets.shares import SharePolicy, ident
from tests.helpers import start_python, wait_until
from tests.targets.queue_simulation import Simulation

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="needs root, to be five users"
)

#: User ids that belong to no user.
USERS = tuple(range(61_001, 61_006))
GPUS = ["0", "1", "2"]

#: A run waits for its GPU, writes into its own file when it got the GPU, and holds the GPU for a while.
RUN = """
import _strptime, fcntl, os, pwd, sys, time
from paceline.targets import host_leases, leases
folder, uid, number, seconds, ahead_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), float(sys.argv[5])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
os.environ["PACELINE_LEASES"] = folder + "/leases"
leases._LOOK_S = leases._PLACE_S = 0.01
claimed = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + ahead_s))
ticket = {"key": f"{claimed}.000Z_{number}", "run_id": number, "pid": os.getpid(), "cores": 0, "gpu_count": 1}
ticket |= {"all_cores": 4, "all_gpus": ["0", "1", "2"], "port_count": 0}
while "granted" not in (answer := host_leases.take(dict(ticket))):
    time.sleep(0.01)
(gpu,) = answer["granted"]["gpus"]
# The kernel keeps the lock of a GPU while its holder lives: two holders at once are an error.
fd = os.open(f"{folder}/gpu{gpu}", os.O_RDONLY)
try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("GIVEN TWICE", gpu, flush=True)
print("holds", gpu, flush=True)
time.sleep(seconds)
os.close(fd)
host_leases.give_back({"key": ticket["key"]})
print("done", flush=True)
"""

#: One user of a machine whose clock jumps: the user's runs ask for GPUs and give them back, at times that the test states.
USER = """
import _strptime, bisect, fcntl, json, os, pwd, sys, time, types
from paceline.targets import host_leases, leases
folder, uid = sys.argv[1], int(sys.argv[2])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
os.environ["PACELINE_LEASES"] = folder + "/leases"
leases._LOOK_S = leases._PLACE_S = 0.0
#: When the clock jumped, by the clock of the kernel, and the time after it.
jumps, times = [0], [0.0]
leases.time = types.SimpleNamespace(time=lambda: times[-1], monotonic=lambda: times[-1], strptime=time.strptime)
host_leases.time = types.SimpleNamespace(time=lambda: times[-1], monotonic=time.monotonic, sleep=time.sleep)
real_load = leases.load_json
def load_json(path, uid):
    value, status = real_load(path, uid)
    changed, written = [times[bisect.bisect(jumps, ns) - 1] for ns in (status.st_ctime_ns, status.st_mtime_ns)]
    return value, types.SimpleNamespace(st_uid=status.st_uid, st_ctime=changed, st_mtime=written)
leases.load_json = load_json
for line in sys.stdin:
    verb, given = json.loads(line)
    if verb == "jump":
        jumps.append(given[0])
        times.append(given[1])
        answer = None
    elif verb == "look":
        answer = [ticket["key"] for ticket in host_leases.look(given)["tickets"]]
    else:
        answer = [getattr(host_leases, verb)({**one, "pid": os.getpid()}).get("granted") for one in given]
    print(json.dumps(answer), flush=True)
"""


class UserDays(Simulation):
    """Simulated days of real Unix users: a process of each user asks for GPUs by the files of the queue."""

    processes: dict[int, subprocess.Popen[str]]

    def user(self, uid: int) -> str:
        return str(uid)

    def ask(self, uid: int, verb: str, given: object) -> Any:
        process = self.processes[uid]
        print(json.dumps([verb, given]), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    def jump(self, now: float) -> None:
        # The kernel stamps files with the time of its last tick, at most 10 ms ago. So files that are written after the pause
        # are younger than the jump.
        at = time.time_ns()
        time.sleep(0.012)
        for uid in self.users:
            self.ask(uid, "jump", [at, now])

    def starts(self, now: float) -> dict[tuple[int, str], list[str]]:
        expected = super().starts(now)
        asking = [one for one in self.tickets if one["since"] == now or ident(one) in expected]
        found = self.take(asking)
        # All ask if the files gave another answer than the plan, and else at every twentieth event.
        everyone = set(found) != set(expected) or len(self.waits) % 20 == 0
        while everyone:
            more = self.take([one for one in self.tickets if one["granted"] is None and ident(one) not in found])
            found.update(more)
            # A start may allow the next.
            everyone = bool(more)
        return found

    def take(self, tickets: list[dict[str, Any]]) -> dict[tuple[int, str], list[str]]:
        found: dict[tuple[int, str], list[str]] = {}
        rest = {"cores": 1, "port_count": 0, "all_cores": 1000, "all_gpus": self.names}
        for uid in self.users:
            own = [one for one in tickets if one["uid"] == uid]
            asked = [rest | {name: one[name] for name in ("key", "run_id", "gpu_count", "limit_s")} for one in own]
            for one, granted in zip(own, self.ask(uid, "take", asked), strict=True):
                if granted is not None:
                    found[ident(one)] = granted["gpus"]
        return found

    def end(self, ticket: dict[str, Any], now: float) -> None:
        super().end(ticket, now)
        self.jump(now)
        self.ask(ticket["uid"], "give_back", [{"key": ticket["key"]}])


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of leases that root has made for all users, with a shares file."""
    # Other users can't enter pytest's folders.
    folder = Path(f"/tmp/paceline-test-{os.getpid()}-{time.monotonic_ns()}")
    for path, mode in ((folder, 0o755), (folder / "leases", 0o1777), (folder / "leases/paceline-share", 0o755)):
        path.mkdir()
        path.chmod(mode)
    (folder / "leases/paceline-share/shares.json").write_text("{}")
    for gpu in GPUS:
        (folder / f"gpu{gpu}").touch()
    try:
        yield folder
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with shared_folder() as folder:
        monkeypatch.setenv("PACELINE_LEASES", str(folder / "leases"))
        yield folder


@pytest.fixture
def runs(machine: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(uid: int, number: object, seconds: float = 0.0, ahead_s: float = 0.0) -> subprocess.Popen[str]:
        started.append(start_python(RUN, machine, uid, number, seconds, ahead_s))
        return started[-1]

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            process.communicate()


def tickets() -> list[dict[str, Any]]:
    return host_leases.look({"gpus": GPUS})["tickets"]


def as_user(uid: int, act: Callable[[], None]) -> None:
    """Call a function in a process of this user."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def kill_at_any_time(machine: Path, start: Callable[..., subprocess.Popen[str]], kills: int) -> None:
    chance, living, killed, number = random.Random(2), [], 0, 0
    outputs: list[str] = []

    def had_lease() -> bool:
        return any("holds" in text and "done" not in text for text in outputs)

    # On a busy machine most processes are killed while they start, so continue until a process had a lease.
    while killed < kills or (killed < 10 * kills and not had_lease()):
        while len(living) < 8:
            number += 1
            # The clocks of the submitting machines differ by up to ten seconds.
            living.append(start(chance.choice(USERS), number, chance.uniform(0, 0.3), chance.uniform(-10, 10)))
        time.sleep(chance.uniform(0, 0.1))
        process = living.pop(chance.randrange(len(living)))
        if process.poll() is None:
            process.send_signal(chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            killed += 1
        outputs.append(process.communicate()[0])
    for process in living:
        outputs.append(process.communicate(timeout=180)[0])
        assert process.returncode == 0
    assert not [text for text in outputs if "GIVEN TWICE" in text]
    assert had_lease(), "none was killed with a lease"
    assert tickets() == []


@pytest.mark.promise("leases-survive-kills")
def test_no_lease_is_given_twice_or_leaked_when_processes_of_five_users_are_killed(machine: Path, runs: Any) -> None:
    kill_at_any_time(machine, runs, 15)


@pytest.mark.promise("leases-survive-kills")
@pytest.mark.proof
def test_no_lease_is_given_twice_or_leaked_in_two_hundred_kills(machine: Path, runs: Any) -> None:
    kill_at_any_time(machine, runs, 200)


def test_use_of_each_user_is_recorded_in_their_own_file(machine: Path, runs: Any) -> None:
    for number, uid in enumerate(USERS[:2]):
        assert "done" in runs(uid, number, 0.2).communicate(timeout=180)[0]
    users = host_leases.look({"gpus": GPUS})["shares"]["users"]
    assert [one["user"] for one in users] == [str(uid) for uid in USERS[:2]]
    for uid in USERS[:2]:
        (path,) = (machine / "leases").glob(f"paceline-leases-{uid}/*/use.json")
        assert path.stat().st_uid == uid
        assert sum(row[2] for row in json.loads(path.read_text())["hours"]) >= 0.2


@pytest.mark.promise("hostile-user-cannot-jump-queue")
def test_hostile_user_can_not_jump_or_block_the_queue(machine: Path, runs: Any) -> None:
    victim, hostile = USERS[:2]
    held = [runs(victim, f"held{number}", 600) for number in range(3)]
    for process in held:
        assert process.stdout.readline().startswith("holds")
    waits = runs(victim, "victim")
    wait_until(lambda: len(tickets()) == 4, "the victim waits")
    (of_victim,) = (machine / "leases").glob(f"paceline-leases-{victim}/*")
    own = machine / f"leases/paceline-leases-{hostile}" / of_victim.name
    forged = {"run_id": "x", "pid": 1, "cores": 0, "gpu_count": 3, "granted": None, "uid": victim, "user": "root"}

    def attack() -> None:
        for path in of_victim.iterdir():
            for refused in (
                path.unlink,
                lambda path=path: path.write_text("{}"),
                lambda path=path: path.rename(machine / "leases/stolen"),
            ):
                with pytest.raises(PermissionError):
                    refused()
        with pytest.raises(PermissionError):
            (machine / "leases/paceline-share/shares.json").write_text('{"shares": {"*": 9}}')
        own.parent.mkdir()
        own.parent.chmod(0o755)
        own.mkdir()
        own.chmod(0o755)
        alive = {**forged, "pid": os.getppid(), "boot_id": host_leases.boot_id()}
        for key, content in {
            "2000-01-01T00:00:00.000Z_past": json.dumps(alive),
            "2999-01-01T00:00:00.000Z_future": json.dumps({**alive, "granted_at": 1e12, "since": 0}),
            "huge": json.dumps({**forged, "key": "huge", "run_id": "y" * (1 << 20)}),
            "deep": "[" * 100_000,
        }.items():
            (own / f"{key}.ticket").write_text(content.replace('"run_id"', f'"key": "{key}", "run_id"', 1))
        (own / "link.ticket").symlink_to(next(of_victim.iterdir()))
        os.mkfifo(own / "fifo.ticket")
        (own / "use.json").write_text('{"hours": [[1e18, -5, NaN, "x"], [0, 1e300, 1, 1]], "typical_s": -1}')
        for number in range(1500):
            (own / f"many{number}.ticket").touch()

    as_user(hostile, attack)
    # The hostile user's requests name processes of another user, so none of them counts.
    assert {ticket["user"] for ticket in tickets()} == {str(victim)}
    held[0].kill()
    assert waits.communicate(timeout=180)[0].endswith("done\n")


@pytest.mark.promise("hostile-user-cannot-jump-queue")
def test_another_user_can_neither_read_a_secret_of_a_run_nor_cancel_it(machine: Path) -> None:
    (machine / "train.py").write_text("import time\ntime.sleep(600)\n")
    environment = {**os.environ, "HF_TOKEN": "hush", "PACELINE_WORKSPACE": str(machine / "workspace")}

    def paceline(*words: str) -> str:
        command = [sys.executable, "-m", "paceline", *words]
        done = subprocess.run(command, cwd=machine, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    run_id = paceline("submit", "-q", "--env", "HF_TOKEN", "train.py")
    folder = RunFolder(machine / "workspace" / "runs" / run_id)
    wait_until(lambda: read.record(folder).status == states.RUNNING, "it runs")

    def attack() -> None:
        assert folder.secrets.exists()  # the user may list the folder
        for refused in (folder.secrets, folder.job, folder.state):
            with pytest.raises(PermissionError):
                refused.read_text()
        with pytest.raises(PacelineError):
            read.request_cancel(folder, by="another")

    try:
        as_user(USERS[0], attack)
        assert not folder.cancel_request.exists()
        assert read.record(folder).status == states.RUNNING
    finally:
        paceline("cancel", "--wait", run_id)


@pytest.mark.promise("hostile-user-cannot-jump-queue")
def test_stopped_process_of_another_user_delays_other_waiting_runs_only_for_seconds(
    machine: Path, runs: Any, monkeypatch: Any
) -> None:
    holders = [runs(USERS[0], f"held{number}", 600) for number in range(3)]
    for process in holders:
        process.stdout.readline()
    stopped = runs(USERS[1], "stopped")
    wait_until(lambda: len(tickets()) == 4, "it waits")
    stopped.send_signal(signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{stopped.pid}/stat").read_text().split(")")[1].split()[0] == "T", "it is stopped")
    later = runs(USERS[2], "later")
    wait_until(lambda: len(tickets()) == 5, "another waits")
    holders[0].kill()
    assert later.communicate(timeout=180)[0].endswith("done\n")
    stopped.send_signal(signal.SIGCONT)
    assert stopped.communicate(timeout=180)[0].endswith("done\n")


def simulated_days(machine: Path, seed: int) -> tuple[UserDays, list[list[str]]]:
    """Let five users ask for GPUs for three days. Return the days, and the queue in the end as each user sees it."""
    shares = {str(USERS[0]): 4, str(USERS[1]): 2, "*": 1}
    (machine / "leases/paceline-share/shares.json").write_text(json.dumps({"shares": shares}))
    days = UserDays(SharePolicy({"shares": shares}), users=USERS, gpus=8, seed=seed)
    days.processes = {uid: start_python(USER, machine, uid, stdin=subprocess.PIPE) for uid in USERS}
    try:
        days.run(days=3)
        return days, [days.ask(uid, "look", {"gpus": days.names}) for uid in USERS]
    finally:
        for process in days.processes.values():
            process.kill()
            process.communicate()


@pytest.mark.proof
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_five_unix_users_get_gpu_hours_by_their_shares_for_three_simulated_days(machine: Path, seed: int) -> None:
    days, orders = simulated_days(machine, seed)
    days.assert_shares_are_kept(days=3)
    assert len(orders[0]) > len(USERS)
    assert orders == [orders[0]] * len(USERS)
