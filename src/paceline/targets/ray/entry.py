"""The shell scripts of Ray jobs, which find an interpreter and start a supervisor.

Ray runs the script in the environment of `ray start` on the head, which may have no Python on the PATH. The interpreter that
has Ray is found in the command line of the raylet, an ancestor of the script.

    raylet ── ray::JobSupervisor ── sh (this) ── supervisor ── driver
"""

from __future__ import annotations

import shlex
from pathlib import Path

from paceline.system.processes import SUPERVISOR_VARIABLE
from paceline.targets.ray.driver_process import DRIVER_VARIABLE, READS, SAYS

#: The variable with the path of Ray's Python interpreter. The supervisor starts the driver with this interpreter.
RAY_PYTHON_VARIABLE = "PACELINE_RAY_PYTHON"
#: The variable with the address of the node that runs the job's script, as Ray names it. It is "" if the script can't find it.
ADDRESS_VARIABLE = "PACELINE_RAY_ADDRESS"
#: The variable with the folder that contains the package `paceline` on the cluster.
LIBRARY_VARIABLE = "PACELINE_RAY_LIBRARY"
#: The variable with the Python interpreter of the program that submitted the job.
SUBMITTER_VARIABLE = "PACELINE_RAY_SUBMITTER"

#: Prefix of the line in the job's output that tells why the run could not start.
COMPLAINT = "paceline: "

_FIND_RAY = r"""
parent=$(sed 's/.*) . \([0-9]*\) .*/\1/' "/proc/$PPID/stat" 2>/dev/null)
ray=$(tr '\000' '\n' <"/proc/$parent/cmdline" 2>/dev/null | sed -n 's/^--python_worker_command="\{0,1\}\([^ "]*\).*/\1/p')
address=$(tr '\000' '\n' <"/proc/$parent/cmdline" 2>/dev/null | sed -n 's/^--node_ip_address=//p')
[ -x "$ray" ] || ray=$(command -v python3 || command -v python)
[ -n "$ray" ] || { echo "paceline: No Python is to be found on the cluster's head"; exit 70; }
"""
#: Part of the job's script that starts the driver (`driver_process`). Ray then loads while the supervisor loads.
_START_DRIVER = f"""
pipes=$(mktemp -d) && mkfifo "$pipes/in" "$pipes/out" && {{
  PYTHONPATH="$PACELINE_SHELL_PYTHONPATH" "$ray" "$library/paceline/targets/ray/driver.py" <"$pipes/in" >"$pipes/out" 2>>"$log" &
  export {DRIVER_VARIABLE}=$!
  exec {READS}>"$pipes/in" {SAYS}<"$pipes/out"
  rm -r "$pipes"
}}
"""
_SEES_RUN = r"""
[ -f "$run/state.json" ] || { echo "paceline: The cluster's head, $(hostname), does not see $run. Share that folder, or \
set a datastore on the compute target"; exit 70; }
cd "$run" || exit 70
if [ -x "$submitter" ]; then python=$submitter; else python=$ray; fi
"""
_FOR_SUPERVISOR = f"""\
export PACELINE_SHELL_PYTHONPATH="$PYTHONPATH" PYTHONPATH="$library"
export {RAY_PYTHON_VARIABLE}="$ray" {ADDRESS_VARIABLE}="$address" {LIBRARY_VARIABLE}="$library"
"""
_LET_GO = f"exec {READS}>&- {SAYS}<&-"
# Ignore SIGTERM, which all processes of a stopped job receive: this shell has to outlive the supervisor.
_STAY = "trap : TERM INT\n"
_END = """
grep -q '"status": "Completed"' state.json
"""


def shared_entrypoint(run_dir: Path, library_dir: Path, python: str) -> str:
    """Return a run's Ray job script for clusters with a shared folder.

    python: The submitting program's interpreter. If the cluster does not have it, the script uses Ray's interpreter.
    """
    run, library = shlex.quote(str(run_dir)), shlex.quote(str(library_dir))
    return (
        f"{_STAY}run={run}\nlibrary={library}\nsubmitter={shlex.quote(python)}"
        f"{_FIND_RAY}{_SEES_RUN}"
        'echo "run $(basename "$run"): its logs are in $run/logs"\n'
        f'{_mark(run_dir.name)}{_FOR_SUPERVISOR}export {SUBMITTER_VARIABLE}="$submitter"\n'
        f'log="$run/logs/driver.log"{_START_DRIVER}'
        f'"$python" -m paceline.supervisor "$run" >>logs/driver.log 2>&1\n{_LET_GO}'
        f"{_END}"
    )


def controller_entrypoint(run_dir: Path, library_dir: Path, python: str, token_variable: str | None) -> str:
    """Return the shell script that runs a sweep's controller on the cluster's head.

    token_variable: The variable from which trials read the cluster's token; None if they use RAY_AUTH_TOKEN.
    """
    run, library = shlex.quote(str(run_dir)), shlex.quote(str(library_dir))
    token = f'export {token_variable}="${{{token_variable}:-$RAY_AUTH_TOKEN}}"\n' if token_variable else ""
    return (
        f"run={run}\nlibrary={library}\nsubmitter={shlex.quote(python)}"
        f"{_FIND_RAY}{_SEES_RUN}"
        f"{_mark(run_dir.name)}{token}"
        'export PACELINE_SHELL_PYTHONPATH="$PYTHONPATH" PYTHONPATH="$library"\n'
        'exec "$python" -m paceline.sweeps "$run" >>logs/driver.log 2>&1\n'
    )


def travel_entrypoint(run_id: str, python: str | None, request: str) -> str:
    """Return a run's Ray job script for clusters without a shared folder.

    python: The job's interpreter; None for Ray's. request: The run's location as one word (`object_sync.Ticket`).
    """
    chosen = f"python={shlex.quote(python)}\n" if python else "python=$ray\n"
    return (
        f"{_STAY}library=$PWD{_FIND_RAY}{chosen}"
        f"{_mark(run_id)}{_FOR_SUPERVISOR}"
        f"log=/dev/stderr{_START_DRIVER}"
        f'"$python" -m paceline.targets.ray.remote_supervisor {shlex.quote(request)}\n'
    )


def examine_entrypoint(request: str) -> str:
    """Return the job script that holds nodes for `paceline compute doctor`.

    request: The request that `driver.py` reads, as one line of JSON.
    """
    return (
        f"{_FIND_RAY}"
        f"{{ printf '%s\\n' {shlex.quote(request)}; exec sleep 600; }} | "
        'exec "$ray" paceline/targets/ray/driver.py\n'
    )


def _mark(run_id: str) -> str:
    return f"export {SUPERVISOR_VARIABLE}={shlex.quote(run_id)}\n"
