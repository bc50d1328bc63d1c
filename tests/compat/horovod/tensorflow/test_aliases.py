"""`import horovod...` finds Paceline's modules for TensorFlow and Keras, each once."""

from __future__ import annotations

from tests.compat.horovod.test_aliases import IMPORT_EACH, MERGED
from tests.engines.conftest import require_module
from tests.ranks import clean_environment
from tests.warm import TENSORFLOW, run_alone

KERAS = (
    "horovod.tensorflow",
    "horovod.tensorflow.mpi_ops",
    "horovod.tensorflow.elastic",
    "horovod.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic",
    "horovod.keras",
    "horovod.keras.callbacks",
    "horovod.keras.elastic",
)


def test_horovod_tensorflow_and_keras_modules_are_the_same_objects_as_in_paceline_compat_horovod(tmp_path):
    require_module("tensorflow")
    script = tmp_path / "script.py"
    script.write_text(
        "import paceline.compat as c; c.install('horovod')\n" + IMPORT_EACH.format(names=KERAS, merged=MERGED)
    )
    done = run_alone(str(script), loaded=TENSORFLOW, environment=clean_environment())
    assert done.returncode == 0, done.stderr
