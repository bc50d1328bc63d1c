"""The settings that helpers keep of a job: plain attributes. Nothing here reads them."""

from __future__ import annotations

from typing import Any


class BaseSettings:
    """key: of the job; start_timeout: a `timeout.Timeout`; nics: names of network interfaces."""

    def __init__(
        self,
        num_proc: int | None = None,
        verbose: int = 0,
        ssh_port: int | None = None,
        ssh_identity_file: str | None = None,
        extra_mpi_args: str | None = None,
        tcp_flag: bool | None = None,
        binding_args: str | None = None,
        key: Any = None,
        start_timeout: Any = None,
        output_filename: str | None = None,
        run_func_mode: bool | None = None,
        nics: Any = None,
        elastic: bool = False,
        prefix_output_with_timestamp: bool = False,
    ) -> None:
        self.num_proc, self.verbose = num_proc, verbose
        self.ssh_port, self.ssh_identity_file = ssh_port, ssh_identity_file
        self.extra_mpi_args, self.tcp_flag, self.binding_args = extra_mpi_args, tcp_flag, binding_args
        self.key, self.start_timeout, self.output_filename = key, start_timeout, output_filename
        self.run_func_mode, self.nics, self.elastic = run_func_mode, nics, elastic
        self.prefix_output_with_timestamp = prefix_output_with_timestamp


class Settings(BaseSettings):
    """hosts: as `host:slots,host:slots`."""

    def __init__(self, hosts: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = hosts
