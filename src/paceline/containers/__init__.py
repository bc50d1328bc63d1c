"""Workers in containers of an image, with podman, docker or apptainer.

The container engine's command line wraps the launcher's command line. mpirun runs in one container; without mpirun each
worker has its own container. A container has the host's network, process ids and user, and the run's folders under the
same paths. So addresses, ports, pids, signals and file names mean the same inside and outside.
"""

from paceline.containers.client import start_failure
from paceline.containers.command import HostFiles, Mount, wrap
from paceline.containers.engine import ENGINE_VARIABLE, ContainerEngine, find_engine
from paceline.containers.image import ImagePython, check_image, check_image_name, check_shm_size, probe
from paceline.containers.layer import KeptLayer, Layer, all_layers, ensure_layer, hold_layer, key_of, prune_layers
from paceline.containers.memory import wrap_all
from paceline.containers.remove import SETTLE_S, remove

__all__ = [
    "ENGINE_VARIABLE", "SETTLE_S", "ContainerEngine", "HostFiles", "ImagePython", "KeptLayer", "Layer", "Mount",
    "all_layers", "check_image", "check_image_name", "check_shm_size", "ensure_layer", "find_engine", "hold_layer",
    "key_of", "probe", "prune_layers", "remove", "start_failure", "wrap", "wrap_all",
]  # fmt: skip
