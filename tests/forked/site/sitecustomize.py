"""Hands a script over to the program that has its libraries loaded, and ends as the script does. See tests/forked."""

import os
import sys


def _script():
    """The words behind `python`, from the script's on; None where it is none that is handed over."""
    place, words = os.environ.get("FORKED_SCRIPTS", ""), sys.orig_argv[1:]
    if words[:1] == ["-u"]:
        words = words[1:]
    is_ours = place.partition(os.pathsep)[0] == sys.executable and "PYTHONHASHSEED" not in os.environ
    return (
        words if is_ours and words and (words[0].endswith(".py") or os.path.basename(words[0]) == "torchrun") else None
    )


def _hand_over(words):
    import json
    import signal
    import socket
    import stat

    def is_open(fd):
        try:
            # Not the folder that is being listed to find them.
            return not stat.S_ISDIR(os.fstat(fd).st_mode)
        except OSError:
            return False

    umask = os.umask(0)
    os.umask(umask)
    fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd)]
    environment = dict(os.environ)
    if "-u" in sys.orig_argv[1:2]:
        environment["PYTHONUNBUFFERED"] = "1"
    told = {"words": words, "environment": environment, "folder": os.getcwd(), "umask": umask, "fds": fds}
    text = json.dumps(told).encode()
    child = 0
    pending = []

    def forward(number, frame):
        if not child:
            pending.append(number)
            return
        try:
            os.kill(child, number)
        except ProcessLookupError:
            pass

    for number in (1, 2, 3, 10, 12, 15, 18):
        # What is ignored here is ignored there.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["FORKED_SCRIPTS"].partition(os.pathsep)[2])
        socket.send_fds(connection, [b"%08d" % len(text)], fds)
        connection.sendall(text)
        answers = connection.makefile("r")
        child = int(answers.readline())
        for number in pending:
            forward(number, None)
        code = int(answers.readline() or -9)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if code != -9 else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if _script():
    _hand_over(_script())
