"""`horovod.runner.common.util`, with the contents of its modules codec, env, secret, settings and timeout.

If a script imports one of these modules by its name, it gets this module (`aliases`). `codec` reads pickles, which can
run any code. So read only pickles from this user's own processes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import pickle
import re
import secrets
import sys
import time
from dataclasses import dataclass
from typing import Any

#: Length in bytes of a secret key and of a message digest.
SECRET_LENGTH = DIGEST_LENGTH = 32
#: Name of the environment variable that passes the key to other processes.
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
#: Patterns of environment variables that are not passed to other machines.
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", HOROVOD_SECRET_KEY}
#: Program of Kubeflow's MPI operator that starts commands on other machines, in place of ssh.
KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"
_RSH_AGENT = "OMPI_MCA_plm_rsh_agent"


def make_secret_key() -> bytes:
    """Return a new random key for `compute_digest`."""
    return secrets.token_bytes(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """Return the message's digest, 32 bytes."""
    return hmac.digest(key, message, hashlib.sha256)


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Return whether `digest` belongs to the message, in constant time."""
    return hmac.compare_digest(compute_digest(key, message), digest)


@dataclass(eq=False, repr=False)
class BaseSettings:
    """Settings of a `horovodrun` job, with Horovod's names."""

    num_proc: int | None = None
    verbose: int = 0
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    extra_mpi_args: str | None = None
    tcp_flag: bool | None = None
    binding_args: str | None = None
    key: Any = None
    start_timeout: Any = None
    output_filename: str | None = None
    run_func_mode: bool | None = None
    nics: Any = None
    elastic: bool = False
    prefix_output_with_timestamp: bool = False


class Settings(BaseSettings):
    """Settings of a `horovodrun` job, with hosts as `host:slots,host:slots`."""

    def __init__(self, hosts: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = hosts


class TimeoutException(Exception):  # noqa: N818
    """A time limit was exceeded."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A time limit in seconds. `message` is the error's text, with a placeholder `{activity}`."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout, self._message = timeout, message
        self._end_s = time.monotonic() + timeout

    def remaining(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self._end_s - time.monotonic())

    def timed_out(self) -> bool:
        """Return whether the time limit is exceeded."""
        return time.monotonic() > self._end_s

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException if the time limit is exceeded."""
        if self.timed_out():
            text = self._message.format(activity=activity).rstrip()
            raise TimeoutException(f"{text.rstrip('.')}. Timeout after {self._timeout} seconds.")


def loads_base64(encoded: str | bytes) -> Any:
    """Decode an object from base64 text."""
    return pickle.loads(base64.b64decode(encoded))


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """Encode the object by cloudpickle as base64 text, or bytes with `to_ascii=False`."""
    # The standard pickle module stores only a function's name. So it can't store a lambda, or a function of the main program.
    import cloudpickle

    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def is_exportable(v: str) -> bool:
    """Return whether the variable of this name may go to another machine."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return the rank and the number of ranks; (0, 1) without a launcher.

    Raises:
        RuntimeError: The launcher has set only one of its two variables for rank and size.
    """
    # Read HOROVOD_RANK first: if horovodrun runs inside an mpirun job, Open MPI's variables belong to that job.
    for prefix in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        names = (f"{prefix}_RANK", f"{prefix}_SIZE")
        values = [os.environ.get(name) for name in names]
        if None not in values:
            return int(values[0] or ""), int(values[1] or "")
        if values != [None, None]:
            missing, there = (names if values[0] is None else names[::-1])[:2]
            raise RuntimeError(f"{there} is set and {missing} is not: a launcher sets both. Unset it or set the other.")
    return 0, 1


def is_kubeflow_mpi() -> bool:
    """Return whether Kubeflow's MPI operator starts the ranks."""
    return os.environ.get(_RSH_AGENT) == KUBEFLOW_MPI_EXEC


# Let `from horovod.runner.common.util import codec` return this module.
codec = env = secret = settings = timeout = sys.modules[__name__]
