"""A job's settings for helpers built on Horovod: plain attributes. Paceline does not read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, repr=False)
class BaseSettings:
    """Settings of a job. `start_timeout` is a `timeout.Timeout`, `nics` names network interfaces."""

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
    """Settings with hosts as `host:slots,host:slots`."""

    def __init__(self, hosts: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = hosts
