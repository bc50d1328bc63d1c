"""The state that pages require before their first block: files, names, other machines. Most require nothing."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline
from paceline.runs import states
from paceline.runs.folder import RunFolder
from tests.docs.pages import ROOT
from tests.docs.reader import Scene
from tests.environments.wheels import make_wheel
from tests.helpers import make_run, write_program, write_tree
from tests.sweeps.helpers import hide_matplotlib

Maker = Callable[[Scene, pytest.MonkeyPatch], None]

#: Page without `.md` -> the function that prepares what the page's blocks need.
SCENES: dict[str, Maker] = {}


#: Page -> beginnings of the commands that only `make proof` runs, because other tests cover them. `make test` only parses these
#: commands, and prints the plan of a sweep or a pipeline.
LATER: dict[str, tuple[str, ...]] = {
    "command-line": (
        "paceline check ",
        # Covered by test_paceline_check_exits_with_1_only_if_parallel_and_single_process_losses_differ.
    ),
    # Other tests run this script with `paceline run`. The page examples.md also uses horovodrun.
    "from-horovod": ("horovodrun ",),
    "from-torchrun": ("torchrun ",),  # another test runs this script with `paceline run`
    "pipelines": (
        "paceline pipeline run ",
        # Covered by test_pipeline_run_executes_the_steps_of_a_file_and_pipeline_show_lists_their_states.
    ),
    "sweeps": ("paceline sweep run examples/",),  # the page examples.md has this command too
}


def supposed_by(*pages: str) -> Callable[[Maker], Maker]:
    """The function sets the scene of these pages."""

    def keep(maker: Maker) -> Maker:
        SCENES.update(dict.fromkeys(pages, maker))
        return maker

    return keep


@supposed_by("README", "examples")
def the_repository_s_examples(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    copy_examples(scene.folder, "parts")
    scene.elsewhere = {
        "$ ": "test_documented_command_prints_the_output_shown_on_its_page",
        "examples/digits": "test_ten_line_example_prints_the_output_on_its_page",
        "paceline.parallelize(": "test_documented_parallelize_example_prints_the_shown_output_on_one_worker_and_on_two",
    }


@supposed_by("quick-start")
def an_empty_folder(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    scene.folder /= "quick"
    scene.folder.mkdir()
    patch.chdir(scene.folder)


@supposed_by("schedules")
def a_job_file_and_no_timer_of_this_machine(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    table = scene.folder / "table"
    write_program(scene.folder / "bin" / "systemctl", "#!/bin/sh\nexit 1\n")
    crontab = f'#!/bin/sh\nif [ "$1" = -l ]; then cat {table}; else cat > {table}; fi\n'
    write_program(scene.folder / "bin" / "crontab", crontab)
    patch.setenv("PATH", f"{scene.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    job = "entry_script: train.py\nscript_params:\n  --lr: ${lr:0.1}\n"
    write_tree(scene.folder, {"table": "", "train.py": "print('trained')\n", "job.yaml": job})
    workspace = paceline.Workspace(scene.folder / ".paceline")
    _, lock = make_run(workspace.runs_dir, "train_1700000000_00000000", states.COMPLETED)
    os.close(lock)


# --- scenes of pages about data and environments


@supposed_by("environments", "data", "backups", "containers", "private-packages")
def packages_and_photos(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    make_wheel(scene.folder / "wheels", "einops", "0.8.1")
    write_tree(
        scene.folder,
        {
            "src/train.py": "import einops\nprint(einops.VERSION)\n",
            "train.py": "print('trained')\n",
            "requirements.txt": "einops\n",
            "photos/a.png": "a",
            "photos/deep/b.png": "b",
        },
    )
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(scene.folder / "wheels"))
    patch.setenv("LAB_SECRET", "not used: nothing is asked of the server")
    scene.instead = {"/mnt/lab": str(scene.folder / "lab")}


@supposed_by("partitions")
def people(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    write_tree(scene.folder, {"registry/a.csv": "name,age\nAnn,41\nBob,29\nCyd,35\n"})
    scene.by = "python"
    scene.before = """
from paceline import Workspace
Workspace.from_config().get_default_datastore().upload("registry", "people")
"""


@supposed_by("kubernetes")
def a_kubeconfig(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    config = {
        "current-context": "lab",
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me"}}],
        "clusters": [{"name": "lab", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "me", "user": {"token": "none"}}],
    }
    write_tree(scene.folder, {"config": json.dumps(config), "train.py": "print('trained')\n"})
    patch.setenv("KUBECONFIG", str(scene.folder / "config"))


# --- scenes of pages about training


@supposed_by("collectives")
def an_array(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    scene.by = "paceline run -j 2 --backend mpi"
    scene.before = "import numpy\narray = numpy.ones(4)"


@supposed_by("torch-mpi")
def a_model(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    scene.by = "paceline run --backend mpi"  # a single rank suffices, because tests/torch_mpi uses several ranks
    scene.before = "import torch\nmodel = torch.nn.Linear(2, 2)"


@supposed_by("parallel")
def a_model_and_its_loader(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    scene.by = "paceline run -j 2 --backend gloo"
    scene.before = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok = nn.Embedding(config.vocab_size, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)))
        self.head = nn.Linear(16, config.vocab_size)

    def forward(self, x):
        return self.head(self.blocks(self.tok(x)))

def loss_of(output, target):
    return nn.functional.cross_entropy(getattr(output, "logits", output).flatten(0, 1), target.flatten())

def accuracy(output, target):
    return (output.argmax(-1) == target).float().mean()

torch.manual_seed(0)
x = torch.randint(0, 32, (32, 8))
loader = test_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x), batch_size=16)
model = Model(config)
optimizer = torch.optim.AdamW(model.parameters())
LlamaForCausalLM(config).save_pretrained("my-model-of-" + __import__("os").environ["PACELINE_RANK"])
"""
    # Each worker writes to a folder of its own, because two workers must not write the same files at the same time.
    scene.instead = {'"my-model"': '"my-model-of-" + __import__("os").environ["PACELINE_RANK"]'}


@supposed_by("command-line")
def a_script_that_calls_parallelize(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PACELINE_GPUS", "0,1,2,3,4,5,6,7")
    patch.setenv("HF_TOKEN", "a-token")
    script = """
import torch
import paceline

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
par = paceline.parallelize(
    model,
    torch.optim.Adam(model.parameters()),
    loader,
    loss=torch.nn.functional.cross_entropy,
    strategy=paceline.PipelineParallel(),
    microbatches=2,
)
for batch in par.epoch(0):
    par.step(batch)
"""
    write_tree(scene.folder, {"train.py": script})


@supposed_by("estimators")
def a_coordinator(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    write_tree(scene.folder, {"examples/tensorflow_multiworker/train.py": "print('trained')\n"})
    write_tree(scene.folder, {"src/train.py": "print('trained')\n"})
    patch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1", "c:1"], "ps": ["d:1"]}}')
    scene.by = "python"
    scene.before = "import paceline as pl\nexp = pl.Experiment(pl.Workspace.from_config(), 'digits')"


# --- scenes of pages about runs


def finished_run(folder: Path) -> RunFolder:
    """The run of the pages on models."""
    run, fd = make_run(folder / ".paceline" / "runs", "digits_1795401140_512a94bf", states.COMPLETED)
    os.close(fd)
    write_tree(run.path, {"outputs/model/weights.txt": "1 2 3"})
    return run


@supposed_by("runs")
def a_run_with_metrics(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    script = "import paceline\nfor step in range(3):\n    paceline.Run.get_context().log('loss', 1, step=step)\n"
    write_tree(scene.folder, {"src/train.py": script})
    exp = paceline.Experiment(paceline.Workspace.from_config(), "digits")
    run = exp.submit(
        paceline.Estimator("src", entry_script="train.py", process_count_per_node=2, distributed_backend="gloo")
    )
    run.wait_for_completion()
    scene.names = {"exp": exp, "run": run}


@supposed_by("when-it-is-slow")
def any_run(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    scene.names = {"run": paceline.Workspace.from_config().get_run(finished_run(scene.folder).path.name)}


@supposed_by("pipelines")
def three_scripts(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    leave = "import sys\nfrom pathlib import Path\nPath(sys.argv[sys.argv.index('--to') + 1], 'a').write_text('a')\n"
    write_tree(
        scene.folder,
        {
            "src/prepare.py": leave,
            "src/train.py": f"{leave}import paceline\npaceline.Run.get_context().log('loss', 1)\n",
            "src/report.py": "print('done')\n",
        },
    )


@supposed_by("sweeps")
def a_quick_trial(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    script = """
import argparse
import paceline
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--hidden", type=int)
given = parser.parse_args()
run = paceline.Run.get_context()
for epoch in range(4):
    run.log("accuracy", 1 - given.lr / (epoch + 1), step=epoch)
"""
    write_tree(scene.folder, {"examples/sweep/train.py": script, "train.py": script})
    hide_matplotlib(scene.folder / ".paceline")
    # Three trials are enough to show that the blocks work.
    scene.instead = {"trials=12": "trials=3", "--trials 6": "--trials 2"}


# --- scenes of pages about models and services

SCORE = """
import json, os, pathlib

def init():
    assert list(pathlib.Path(os.environ["AZUREML_MODEL_DIR"]).iterdir())

def run(data):
    return [3] * len(json.loads(data)["data"])
"""


@supposed_by("models")
def models(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    workspace = paceline.Workspace.from_config()
    finished_run(scene.folder)
    paceline.Datastore.register(workspace, "lab", str(scene.folder / "lab"))


@supposed_by("services")
def a_model_that_is_registered(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    write_tree(scene.folder, {"score.py": SCORE, "examples/tutorial/score.py": SCORE, "model.txt": "2"})
    workspace = paceline.Workspace.from_config()
    for number in range(4):
        (scene.folder / "model.txt").write_text(str(number))
        paceline.Model.register(workspace, "model.txt", "digits")


@supposed_by("serving")
def a_model_of_scikit_learn(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    import joblib
    import numpy

    folder = scene.folder / "model"
    folder.mkdir()
    workspace = paceline.Workspace.from_config()
    for number in range(3):
        # The server needs an object with a `predict` function. This is the smallest one that joblib can store.
        joblib.dump(argparse.Namespace(predict=numpy.asarray, number=number), folder / "model.joblib")
        paceline.Model.register(workspace, "model/model.joblib", "digits")
    write_tree(scene.folder, {"sample.json": '{"data": [[0, 1, 2]]}'})


# --- scenes of pages about other machines

#: This fake `ssh` runs the command on this machine for every host.
SSH = """#!/bin/sh
[ "$1" = -G ] && exit 0
for last; do :; done
exec sh -c "$last"
"""


@supposed_by(
    "compute",
    "ssh",
    "slurm",
    "ray",
    "several-gpus",
    "sharing-machines",
    "several-machines",
    "snapshots",
    "launchers",
    "worker-environment",
    "secrets",
)
def hosts(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    write_program(scene.folder / "bin" / "ssh", SSH)
    patch.setenv("PATH", f"{scene.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    write_tree(
        scene.folder,
        {"train.py": "print('trained')\n", "src/train.py": "print('trained')\n", "hosts.txt": "gpu1 slots=4\ngpu2:8\n"},
    )


@supposed_by("writing-a-target")
def an_installed_package(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    """An entry point is found in an environment alone, which tests/testing makes."""
    scene.elsewhere = {
        "--kind nice": "test_commands_of_the_documentation_page_on_target_plugins_run",
        "NiceTarget": "test_commands_of_the_documentation_page_on_target_plugins_run",
        "TargetConformance": "test_documented_example_target_passes_the_conformance_suite",
    }


@supposed_by("targets")
def here(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    write_tree(scene.folder, {"src/train.py": "print('trained')\n"})
    scene.instead = {'"lab"': '"local"', "process_count_per_node=4": "process_count_per_node=1"}


def copy_examples(folder: Path, name: str) -> None:
    shutil.copytree(ROOT / "examples" / name, folder / "examples" / name)
