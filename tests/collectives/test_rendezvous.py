"""How ranks find each other without MPI, and that a script's own process group does not come in the way."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.collectives import CollectivesError, rendezvous, request
from paceline.collectives.rendezvous import SignedStore, run_secret
from paceline.collectives.request import Agreement, Request
from paceline.system.handshake import RUN_SECRET_VARIABLE
from tests.collectives.gloo_world import ROOT, Ranks
from tests.engines.conftest import require_engine
from tests.helpers import free_port
from tests.warm import TORCH, run_alone

#: This script creates its own process group before or after Paceline's, as `order` says. Then it uses both in turn.
BESIDE = """
import sys, numpy, torch, torch.distributed as dist
from paceline import collectives

def own():
    dist.init_process_group("gloo")

def ours():
    collectives.start()

steps = {"before": [own, ours], "after": [ours, own]}[sys.argv[1]]
for step in steps:
    step()
engine = collectives.current()
assert engine.transport_name == "gloo"
for _ in range(3):
    t = torch.ones(3)
    dist.all_reduce(t)
    assert t[0] == engine.size
    assert engine.allreduce("a", numpy.ones(3)).wait(120)[0] == engine.size
if sys.argv[2] == "destroy":
    dist.destroy_process_group()
    assert engine.allreduce("b", numpy.ones(3)).wait(120)[0] == engine.size
    collectives.stop()
    # The store is still there for another start, though the group that may have made it is gone.
    engine = collectives.start()
    assert engine.allreduce("b", numpy.ones(3)).wait(120)[0] == engine.size
collectives.stop()
print("ok", flush=True)
"""

KEY, OTHER = b"k" * 32, b"o" * 32
WHERE = "10.0.0.1:29500"


@pytest.mark.parametrize(("order", "end"), [("before", "destroy"), ("after", "destroy"), ("after", "keep")])
def test_own_torch_process_group_of_a_script_works_beside_that_of_paceline(order, end, tmp_path):
    script = tmp_path / "beside.py"
    script.write_text(BESIDE)
    world = Ranks(2, script, order, end, cwd=tmp_path).wait()
    assert world.codes == [0, 0], world.told()


@pytest.mark.proof
def test_rank_under_torchrun_uses_the_store_of_the_agent(tmp_path):
    require_engine("torch", importlib.util.find_spec("torch"))
    script = tmp_path / "beside.py"
    script.write_text(BESIDE)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "OMPI_"))}
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script), "after", "keep"],
        cwd=tmp_path,
        env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ok") == 2


def test_timeout_of_the_rendezvous_names_the_missing_rank(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import os, sys\nfrom paceline import collectives\n"
        "if os.environ['RANK'] == '1': sys.exit()\n"
        "try: collectives.start()\nexcept collectives.CollectivesError as error: print('told:', error)\n"
    )
    world = Ranks(3, script, cwd=tmp_path, HOROVOD_GLOO_TIMEOUT_SECONDS="20").wait()
    assert "told: rank 1 of 3 ranks did not call hvd.init() within 20 s of rank 0" in world.outputs[0], world.told()


def test_rendezvous_error_names_a_port_that_another_program_occupies(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        script = tmp_path / "taken.py"
        script.write_text(
            "from paceline import collectives\n"
            "try: collectives.start()\nexcept collectives.CollectivesError as error: print('told:', error)\n"
        )
        world = Ranks(1, script, cwd=tmp_path, MASTER_PORT=port, WORLD_SIZE="2").wait()
    assert f"told: rank 0 can't reach the store at MASTER_ADDR=127.0.0.1, MASTER_PORT={port}" in world.outputs[0]


def test_rendezvous_error_lists_missing_and_set_variables():
    with pytest.raises(CollectivesError, match="RANK='0', WORLD_SIZE='2', MASTER_ADDR missing, MASTER_PORT='x'"):
        rendezvous.place({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "x"})


@pytest.mark.promise("operations-same-over-mpi-over")
def test_every_operation_over_gloo_equals_numpy(tmp_path):
    # Use three ranks, because Horovod's checks already run over Gloo with two ranks
    # (tests/compat/horovod/test_on_gloo.py).
    world = Ranks(3, Path(__file__).with_name("engine_checks.py"), cwd=tmp_path).wait()
    assert world.codes == [0] * 3, world.told()


class Store(dict):
    """As much of torch's store as is used."""

    def set(self, name, value):
        self[name] = value

    def check(self, names):
        return all(name in self for name in names)


def part(store, key=KEY, prefix="run/1"):
    return SignedStore(store, prefix, WHERE, key)


@pytest.mark.parametrize("key", [KEY, None])
def test_rendezvous_store_returns_a_value_that_was_set_with_and_without_a_secret(key):
    store = Store()
    assert not part(store, key).has("a")
    part(store, key).set("a", ["host", 4, None, [1, 2]])
    assert part(store, key).has("a")
    assert part(store, key).get("a") == ["host", 4, None, [1, 2]]


@pytest.mark.promise("value-ranks-store-nobody-run")
@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda store: store.set("a", b'["mine"]'), "is not signed with the run's secret"),
        (lambda store: store.set("a", b"\x01signed short"), "is not signed with the run's secret"),
        (lambda store: part(store, OTHER).set("a", 1), "is signed with another secret than the run's"),
        # A value that a rank has signed for another name, or for another part of the store, is refused.
        (lambda store: (part(store).set("b", 1), store.set("a", store["b"])), "is signed with another secret"),
        (lambda store: part(store, prefix="run/2").set("a", 1), "is signed with another secret than the run's"),
    ],
)
def test_unsigned_store_value_is_refused(write, told):
    store = Store()
    write(store)
    with pytest.raises(CollectivesError, match=told) as caught:
        part(store).get("a")
    assert "'run/1/a' in the store at 10.0.0.1:29500" in str(caught.value)


def test_rank_without_the_secret_refuses_store_values():
    store = Store()
    part(store).set("a", 1)
    with pytest.raises(CollectivesError, match=f"was given no {RUN_SECRET_VARIABLE}"):
        part(store, None).get("a")
    store.set("a", b"\x80\x05no json")
    with pytest.raises(CollectivesError, match="is not JSON"):
        part(store, None).get("a")


def test_invalid_address_of_a_rank_is_named_in_the_error():
    assert rendezvous._address("fe80::1%eth0", 2) == "fe80::1%eth0"
    with pytest.raises(CollectivesError, match="rank 2 sent the address 'worker:1', which is not an IP address"):
        rendezvous._address("worker:1", 2)


@pytest.mark.parametrize("text", ["secret", "abcd", "zz" * 32])
def test_invalid_secret_is_refused_without_being_shown(text):
    with pytest.raises(CollectivesError, match=f"{RUN_SECRET_VARIABLE} holds no secret") as caught:
        run_secret({RUN_SECRET_VARIABLE: text})
    assert (
        text not in str(caught.value).replace("holds no secret", "").replace("make one with", "").split("secrets;")[0]
    )
    assert run_secret({}) is None


class Bad:
    def __reduce__(self):
        return (os.system, ("touch PWNED",))


def test_message_between_ranks_is_refused_if_its_pickle_contains_classes_that_are_not_allowed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = (
        1,
        (2, 3),
        (Request("allreduce", "a", ("float32",), ((2,),)),),
        False,
        b"\x00",
        Agreement(Request("join", "")),
    )
    assert request.unpack_message(request.pack_message(message)) == message
    for data in (pickle.dumps(Bad()), pickle.dumps(Path("x")), b"cos\nsystem\n(S'touch PWNED'\ntR.", b"", b"{}"):
        with pytest.raises(CollectivesError, match=r"what came (names|is not a message)"):
            request.unpack_message(data)
    assert not (tmp_path / "PWNED").exists()


#: This program starts and ends an engine, and starts another engine after a stranger has written to the store. Rank 0 does not
#: publish its address, so the other rank finds what the stranger has written there.
RANK = """
import os, pathlib, threading, time
from paceline import collectives
from paceline.collectives import links

def leave():
    while not os.path.exists("over"): time.sleep(0.02)
    os._exit(0)

collectives.start(); collectives.stop()
rank = os.environ["RANK"]
if rank == "0":
    links.listen = lambda address: time.sleep(600)
    threading.Thread(target=leave, daemon=True).start()
pathlib.Path("ready" + rank).touch()
while not os.path.exists("go"): time.sleep(0.02)
try:
    collectives.start()
except collectives.CollectivesError as error:
    print("told:", error, flush=True)
finally:
    pathlib.Path("over").touch()
"""
#: This program only knows the store's address and port, as a port scanner would.
STRANGER = """
import os, pickle, sys
from torch.distributed import TCPStore
class Bad:
    def __reduce__(self): return (os.system, ("touch PWNED",))
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
name = next(key for key in store.list_keys() if "/0/links/server" in key)
store.set(name.replace("/0/links", "/1/links"), pickle.dumps(Bad()))
"""


@pytest.mark.promise("value-ranks-store-nobody-run")
@pytest.mark.parametrize("secret", ["5e" * 32, ""])
def test_foreign_process_cannot_run_code_through_the_store(secret, tmp_path):
    # Regression: every rank except rank 0 unpickled data that a foreign process had put into the store, and so could
    # run its code.
    for name, text in (("rank.py", RANK), ("stranger.py", STRANGER)):
        (tmp_path / name).write_text(text)
    world = Ranks(2, "rank.py", cwd=tmp_path, **({RUN_SECRET_VARIABLE: secret} if secret else {}))
    end_s = time.monotonic() + 120
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        if time.monotonic() > end_s or any(process.has_ended for process in world.processes):
            raise AssertionError(world.wait(1).told())
        time.sleep(0.02)
    stranger = run_alone("stranger.py", str(world.port), loaded=TORCH, environment=os.environ, timeout_s=120)
    assert stranger.returncode == 0, stranger.stderr
    (tmp_path / "go").touch()
    world.wait()
    assert not (tmp_path / "PWNED").exists()
    rule = "is not signed with the run's secret" if secret else "is not JSON"
    assert f"/1/links/server' in the store at 127.0.0.1:{world.port} {rule}" in world.outputs[1], world.told()
