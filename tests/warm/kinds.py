"""What the programs load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tests.conftest import IS_PROOF


class Kind(NamedTuple):
    """loads: those that are not installed are left out. variables: those that count when it is loaded. programs: with two,
    neighbouring ranks have other hash seeds than one another, as they have when each is started by itself: an order which
    depends on them is found. is_shared: by all of pytest's processes."""

    loads: tuple[str, ...]
    variables: Mapping[str, str] = {}
    programs: int = 1
    is_shared: bool = True


TORCH = "torch"
KERAS_ON_TORCH = "keras on torch"
TENSORFLOW = "tensorflow"
OLDER_KERAS = "tf_keras"
#: The kind of program for tests of the fork server itself, which need few modules.
NUMPY = "numpy alone"
EXAMPLES = "what the examples import"
COMMAND_LINE = "the command line"

_TORCH = (
    *("torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("torch.distributed.checkpoint.state_dict", "torch.nn.parallel", "torch.optim", "torch.utils.data"),
    # The first step of an optimizer loads this module.
    "torch._dynamo",
)
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}

#: Kind -> modules that its program loads. Triton comes first: it ends the process if it is loaded after TensorFlow. TensorFlow
#: is only loaded, and not used, because its threads would not exist in a fork. TensorFlow also loads Keras 3, unless
#: TF_USE_LEGACY_KERAS selects tf_keras.
KINDS = {
    TORCH: Kind(_TORCH, programs=2),
    # One program is enough, because tests with TensorFlow also run Paceline's Keras code, with other hash seeds.
    KERAS_ON_TORCH: Kind(
        ("torch", "torch.distributed", "torch._dynamo", "keras", "sklearn.datasets"), {"KERAS_BACKEND": "torch"}
    ),
    TENSORFLOW: Kind(
        ("triton", "tensorflow", "keras", "sklearn.datasets"),
        {"KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": "0"} | _QUIET,
        # Loading TensorFlow takes 7 CPU seconds, so only `make proof` uses two programs, whose hash seeds differ.
        programs=2 if IS_PROOF else 1,
    ),
    OLDER_KERAS: Kind(("triton", "tensorflow", "tf_keras", "sklearn.datasets"), {"TF_USE_LEGACY_KERAS": "1"} | _QUIET),
    NUMPY: Kind(("numpy",), programs=2, is_shared=False),
    # Leave out torch.utils.tensorboard, because it loads TensorFlow: that takes five seconds and doubles the time of each fork.
    EXAMPLES: Kind(
        (
            *("numpy", *_TORCH, "torch.utils.data.distributed", "accelerate"),
            *("sklearn.datasets", "sklearn.linear_model", "sklearn.model_selection", "matplotlib.pyplot"),
            # This kernel runs the cells of a notebook.
            "ipykernel.ipkernel",
        ),
    ),
    COMMAND_LINE: Kind(
        tuple(
            f"paceline.{name}"
            for name in (
                *("cli.main", "cli.quick", "cli.run", "cli.read", "cli.logs", "cli.files", "cli.sweep", "cli.model"),
                *("cli.service", "cli.compute", "cli.data", "cli.serve", "cli.env", "cli.pipeline"),
                "system.detached_process",
            )
        )
    ),
}
