"""The text that `horovodrun --check-build` prints."""

from __future__ import annotations

from importlib.util import find_spec

from paceline.compat.horovod._version import __version__
from paceline.compat.horovod.common import basics
from paceline.compat.horovod.runner import start


def text() -> str:
    """Frameworks and transports, each with a cross where it can be used."""
    from paceline import __version__ as own

    frameworks = {
        "TensorFlow": find_spec("tensorflow") is not None,
        "PyTorch": find_spec("torch") is not None,
        "MXNet": False,
    }
    transports = {"MPI": basics.mpi_built() and start.has_mpi(), "Gloo": basics.gloo_built()}
    # The words and brackets are those of Horovod's output, for scripts that search it.
    lines = [f"Horovod's interface of v{__version__}, from Paceline {own}:", "", "Available Frameworks:"]
    lines += [_line(*item) for item in frameworks.items()]
    lines += ["", "Available Controllers:", *(_line(*item) for item in transports.items())]
    operations = {"NCCL": _has_nccl(), "DDL": False, "CCL": False, **transports}
    lines += ["", "Available Tensor Operations:", *(_line(*item) for item in operations.items())]
    return "\n".join(lines)


def _line(name: str, is_there: bool) -> str:
    return f"    [{'X' if is_there else ' '}] {name}"


def _has_nccl() -> bool:
    """True if torch was built with NCCL: only torch itself can tell."""
    try:
        import torch  # noqa: F401 - loaded for `nccl_built`
    except ImportError:
        return False
    return bool(basics.nccl_built())
