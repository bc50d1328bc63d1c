"""The training scripts of the conformance suite.

They need only the standard library, and modules of Paceline that workers may import.
"""

from __future__ import annotations

#: A module that each script can import. `meet()` is a barrier for all workers over sockets. It returns the sum of their ranks.
MEETING = '''\
import os, socket, struct, time

RANK, SIZE = int(os.environ["PACELINE_RANK"]), int(os.environ["PACELINE_WORLD_SIZE"])


def meet():
    if SIZE == 1:
        return RANK
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if RANK == 0:
        with socket.create_server(place) as server:
            guests = [server.accept()[0] for _ in range(SIZE - 1)]
            total = sum(struct.unpack("i", guest.recv(4))[0] for guest in guests)
            for guest in guests:
                guest.sendall(struct.pack("i", total))
                guest.close()
            return total
    while True:
        try:
            with socket.create_connection(place, timeout=60) as host:
                host.sendall(struct.pack("i", RANK))
                return struct.unpack("i", host.recv(4))[0]
        except ConnectionError:
            time.sleep(0.02)


def daemon(run_id):
    """Leave a process behind that nobody finds by its parent, its group, its session or its environment."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sh", ["sh", "-c", "sleep 600; exit", run_id], {})
        os._exit(0)
    os.wait()
'''

#: A script that writes its environment to outputs/seen_<rank>.json, and creates all kinds of files, metrics, tags and output.
PLAIN = '''\
import hashlib, json, os, random, stat, sys

from meeting import RANK, SIZE, meet

import paceline

ODD = "a folder; $(touch owned) 'x'"


def mpi_sum():
    """Over MPI itself, where the workers have mpi4py."""
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return MPI.COMM_WORLD.allreduce(RANK)


run = paceline.Run.get_context()
print(f"rank {RANK} of {SIZE}: first line")
print(f"rank {RANK}: to standard error", file=sys.stderr)
seen = {
    "argv": sys.argv[1:],
    "environment": dict(os.environ),
    "cwd": os.getcwd(),
    "file": __file__,
    "python": list(sys.version_info[:2]),
    "stdin": sys.stdin.read(),
    "tool": os.access("data/tool.sh", os.X_OK),
    "link": os.readlink("data/link"),
    "sum": meet(),
    "mpi_sum": mpi_sum() if "OMPI_COMM_WORLD_RANK" in os.environ else None,
}
for step in range(5):
    run.log("loss", RANK + 1 / (step + 1), step=step)
if RANK == 0:
    run.tag("said", "by the worker; $(touch owned)")
    with open("model.bin", "wb") as file:
        file.write(b"model")
    run.upload_file("kept/model.bin", "model.bin")
with open(os.path.join(os.environ["PACELINE_CHECKPOINT_DIR"], f"rank_{RANK}"), "w") as file:
    file.write("last")
os.makedirs(f"outputs/{ODD}", exist_ok=True)
blob = random.Random(RANK).randbytes(3 << 20)
with open(f"outputs/{ODD}/blob_{RANK}", "wb") as file:
    file.write(blob)
os.chmod(f"outputs/{ODD}/blob_{RANK}", 0o755)
seen["blob"] = hashlib.sha256(blob).hexdigest()
open(f"outputs/empty_{RANK}", "w").close()
with open(f"outputs/seen_{RANK}.json", "w") as file:
    json.dump(seen, file)
for number in range(2000):
    print(f"rank {RANK}: line {number}")
'''

#: A script that runs until SIGTERM. Each worker then takes half a second to save a checkpoint; the last rank ignores SIGTERM.
HOLD = """\
import os, signal, sys, time

import paceline

from meeting import RANK, SIZE, daemon

run = paceline.Run.get_context()


def save(number, frame):
    time.sleep(0.5)
    with open(os.path.join(os.environ["PACELINE_CHECKPOINT_DIR"], f"rank_{RANK}"), "w") as file:
        file.write("all of it")
    print("saved", flush=True)
    sys.exit(0)


is_deaf = SIZE > 1 and RANK == SIZE - 1
signal.signal(signal.SIGTERM, signal.SIG_IGN if is_deaf else save)
daemon(run.id)
run.log("alive", RANK)
print(f"rank {RANK} holds", flush=True)
while True:
    time.sleep(600)
"""

#: A script that writes a log, metrics and files, runs until Paceline ends it, and prints a last line.
LEAVE_AND_WAIT = """\
import signal, sys, time

import paceline


def end(number, frame):
    print("told to end", flush=True)
    sys.exit(0)


signal.signal(signal.SIGTERM, end)
run = paceline.Run.get_context()
run.log("early", 0.5, step=3)
run.tag("early", "tag")
with open("outputs/early.txt", "w") as file:
    file.write("early")
run.upload_file("kept/early.txt", "outputs/early.txt")
print("has left it", flush=True)
time.sleep(600)
"""

#: A script that runs until Paceline ends it, without a signal handler.
WAIT = """\
import time

from meeting import RANK

print(f"rank {RANK} holds", flush=True)
time.sleep(600)
"""

#: A script whose last rank fails after the barrier; the other ranks run until Paceline ends them.
FAIL = """\
import signal, sys, time

from meeting import RANK, SIZE, meet

meet()
if RANK == SIZE - 1:
    if SIZE == 1:
        sys.exit(7)
    raise ValueError("wrong; $(touch owned) 'x'")
while True:
    time.sleep(600)
"""

#: A script whose last rank is killed in the first attempt; the second attempt resumes from the checkpoint.
KILLED_ONCE = """\
import os, signal, sys, time

import paceline

from meeting import RANK, SIZE, meet

attempt = int(os.environ["PACELINE_ATTEMPT"])
folder = os.environ["PACELINE_CHECKPOINT_DIR"]
paceline.Run.get_context().log("attempt", attempt)
print(f"attempt {attempt} of rank {RANK} in {folder}", flush=True)
if attempt == 1:
    with open(f"{folder}/rank_{RANK}", "w") as file:
        file.write("step 10")
    meet()
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
with open(f"{folder}/rank_{RANK}") as file:
    print("resumed from", file.read())
with open(f"outputs/attempt_{RANK}", "w") as file:
    file.write(str(attempt))
"""

#: A script for a run that loses a node in its first attempt.
LOST_ONCE = """\
import os, time

from meeting import RANK, meet

meet()
print(f"attempt {os.environ['PACELINE_ATTEMPT']} of rank {RANK}", flush=True)
if os.environ["PACELINE_ATTEMPT"] == "1":
    time.sleep(600)
"""
