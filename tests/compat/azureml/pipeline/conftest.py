from __future__ import annotations

import pytest

from tests.helpers import write_tree

#: Scripts of steps: leave.py writes its first output as a file, and its second one as a folder. take.py reads both.
SCRIPTS = {
    "leave.py": "import os, sys\n"
    # The path of a PipelineData does not exist yet. A script creates a file or a folder there.
    "with open(sys.argv[1], 'w') as file:\n"
    "    file.write('one')\n"
    "with open(os.path.join(sys.argv[2], 'x.txt'), 'w') as file:\n"
    "    file.write('two')\n",
    "take.py": "import os, sys\n"
    "from azureml.core import Run\n"
    "from azureml.pipeline.core import PipelineRun\n"
    "run = Run.get_context()\n"
    "one, two, times = sys.argv[1:]\n"
    "assert open(one).read() == 'one' and os.environ['AZUREML_DATAREFERENCE_one'] == one\n"
    "assert open(os.path.join(two, 'x.txt')).read() == 'two' and os.environ['second'] == two\n"
    "assert os.environ['AML_PARAMETER_mode'] == 'fast'\n"
    "pipeline = PipelineRun(run.experiment, run.parent.id)\n"
    "assert pipeline.find_step_run('leave')[0].get_status() == 'Completed'\n"
    "run.log('times', int(times))\n"
    "print('took both')\n",
    "fail.py": "raise ValueError('no luck')\n",
}


@pytest.fixture
def source(tmp_path):
    return write_tree(tmp_path / "src", SCRIPTS)
