"""An example of each verb and the verb's page, for `--help` and the manual's page."""

from __future__ import annotations

from pathlib import Path

import paceline

#: Command -> an example call. A test parses each example.
EXAMPLES = {
    "": "paceline run train.py",
    "init": "paceline init my-training",
    "examples": "paceline examples sweep",
    "docs": "paceline docs sweeps",
    "run": "paceline run -j 2 --backend gloo train.py -- --epochs 5",
    "submit": "RUN=$(paceline submit train.py -- --epochs 5)",
    "rerun": "paceline rerun brave-otter-12",
    "check": "paceline check -j 2 train.py",
    "sweep run": "paceline sweep run train.py --param 'lr=uniform(0,1)' --metric loss",
    "sweep show": "paceline sweep show --top 10",
    "sweep best": "paceline sweep best calm-heron-3",
    "sweep stop": "paceline sweep stop calm-heron-3",
    "sweep more": "paceline sweep more calm-heron-3 --trials 10",
    "sweep again": "paceline sweep again calm-heron-3 --param 'lr=uniform(0,0.01)'",
    "sweep resume": "paceline sweep resume calm-heron-3",
    "pipeline run": "paceline pipeline run pipeline.yaml --param epochs=5",
    "pipeline show": "paceline pipeline show -f",
    "template add": "paceline template add digits job.yaml",
    "template list": "paceline template list",
    "template show": "paceline template show digits",
    "template remove": "paceline template remove digits",
    "schedule add": "paceline schedule add '0 3 * * *' job.yaml lr=0.2",
    "schedule list": "paceline schedule list",
    "schedule show": "paceline schedule show job",
    "schedule run": "paceline schedule run job",
    "schedule pause": "paceline schedule pause job",
    "schedule resume": "paceline schedule resume job",
    "schedule remove": "paceline schedule remove job",
    "schedule tick": "paceline schedule tick",
    "status": "paceline status brave-otter-12",
    "list": "paceline list --experiment digits --status Failed",
    "show": "paceline show brave-otter-12",
    "logs": "paceline logs -f --tail 20 brave-otter-12",
    "metrics": "paceline metrics --name loss brave-otter-12 calm-heron-3",
    "diff": "paceline diff brave-otter-12 calm-heron-3",
    "compare": "paceline compare brave-otter-12 calm-heron-3 lucky-fox-7",
    "report": "paceline report brave-otter-12 calm-heron-3 -o report.html",
    "files": "paceline files brave-otter-12 '*.pt'",
    "download": "paceline download brave-otter-12 outputs --to results",
    "ui": "paceline ui --open",
    "account add": "paceline account add nightly --role own --expires 30d",
    "account list": "paceline account list",
    "account remove": "paceline account remove nightly",
    "account log": "paceline account log",
    "export": "paceline export brave-otter-12 -o metrics.csv",
    "import": "paceline import mlflow mlruns",
    "relay": "paceline relay brave-otter-12 --to mlflow=http://localhost:5000",
    "tensorboard": "paceline tensorboard brave-otter-12 calm-heron-3",
    "usage": "paceline usage --goodput brave-otter-12",
    "top": "paceline top brave-otter-12",
    "stacks": "paceline stacks brave-otter-12",
    "profile": "paceline profile --seconds 10 brave-otter-12",
    "exec": "paceline exec brave-otter-12 --rank 1 -- nvidia-smi",
    "dev": "paceline dev gpu-box --idle 1h",
    "forward": "paceline forward brave-otter-12 6006 --local 6006",
    "cancel": "paceline cancel --wait brave-otter-12",
    "model register": "paceline model register digits outputs/model --run brave-otter-12",
    "model list": "paceline model list digits --latest",
    "model show": "paceline model show digits:3",
    "model alias": "paceline model alias digits production 3",
    "model update": "paceline model update digits:3 --tag checked=yes",
    "model diff": "paceline model diff digits:2 digits:3",
    "model download": "paceline model download digits@production --to models",
    "model verify": "paceline model verify digits:3",
    "model delete": "paceline model delete digits:1",
    "model push": "paceline model push digits:3 lab:models",
    "model pull": "paceline model pull lab:models digits:3",
    "serve": "paceline serve digits --entry score.py",
    "service deploy": "paceline service deploy digits --model digits:3 --entry score.py",
    "service list": "paceline service list",
    "service show": "paceline service show digits",
    "service logs": "paceline service logs -f digits",
    "service call": "paceline service call digits @request.json",
    "service update": "paceline service update digits --model digits:4",
    "service reload": "paceline service reload digits",
    "service scale": "paceline service scale digits 4",
    "service rollback": "paceline service rollback digits",
    "service keys": "paceline service keys digits --regenerate secondary",
    "service stop": "paceline service stop digits",
    "service start": "paceline service start digits",
    "service delete": "paceline service delete digits",
    "service unit": "paceline service unit digits",
    "service bench": "paceline service bench digits @request.json --seconds 10",
    "package": "paceline package digits:3 -o digits-server --entry score.py",
    "compute add": "paceline compute add lab --kind ssh --host node1 --host node2",
    "compute list": "paceline compute list",
    "compute show": "paceline compute show lab",
    "compute login": "paceline compute login lab",
    "compute remove": "paceline compute remove lab",
    "compute doctor": "paceline compute doctor lab --nodes 2",
    "queue": "paceline queue lab",
    "share init": "paceline share init",
    "share check": "paceline share check",
    "env list": "paceline env list",
    "env show": "paceline env show torch-2",
    "env build": "paceline env build --requirements requirements.txt --name torch-2",
    "env prune": "paceline env prune --unused-for 30d",
    "data list": "paceline data list",
    "data add": "paceline data add lab s3://bucket/data",
    "data remove": "paceline data remove lab",
    "data ls": "paceline data ls lab:mnist/train",
    "data upload": "paceline data upload ./mnist lab:mnist",
    "data download": "paceline data download lab:mnist ./mnist",
    "data cache": "paceline data cache",
    "data prune": "paceline data prune --to 20GB",
    "data freeze": "paceline data freeze digits:3 --to lab",
    "data check": "paceline data check digits:3",
    "azureml check": "paceline azureml check src",
    "azureml install": "paceline azureml install",
    "azureml uninstall": "paceline azureml uninstall",
    "rename": "paceline rename brave-otter-12 baseline",
    "note": "paceline note brave-otter-12 'Diverges with **fp16**.'",
    "comment": "paceline comment brave-otter-12 'The learning rate is too high.'",
    "tag": "paceline tag brave-otter-12 best epochs=3",
    "archive": "paceline archive brave-otter-12",
    "rm": "paceline rm brave-otter-12",
    "restore": "paceline restore brave-otter-12",
    "backup create": "paceline backup create lab --keep 7",
    "backup list": "paceline backup list lab",
    "backup verify": "paceline backup verify lab",
    "backup restore": "paceline backup restore lab --into restored",
    "backup remove": "paceline backup remove lab --keep 3",
    "prune": "paceline prune --older-than 30d --dry-run",
    "trust": "paceline trust /group/.paceline",
    "bug-report": "paceline bug-report brave-otter-12",
}

#: Command -> its topic in `paceline docs`, if the topic has another name than the command.
TOPICS = {
    "azureml": "from-azureml",
    "backup": "backups",
    "env": "environments",
    "model": "models",
    "package": "services",
    "pipeline": "pipelines",
    "profile": "when-it-is-slow",
    "queue": "sharing-machines",
    "schedule": "schedules",
    "serve": "serving",
    "service": "services",
    "share": "sharing-machines",
    "account": "ui",
    "stacks": "when-it-hangs",
    "sweep": "sweeps",
    "template": "command-line",
    "top": "when-it-is-slow",
    "trust": "security",
}


def topic_of(verb: str) -> str:
    """Return the topic in `paceline docs` that explains a subcommand, such as "sweep run"."""
    first = verb.partition(" ")[0]
    return TOPICS.get(first, first)


def installed(name: str) -> Path:
    """Return the folder `docs` or `examples` of the package or of a checkout."""
    package = Path(paceline.__file__).resolve().parent
    inside = package / name
    return inside if inside.is_dir() else package.parents[1] / name


def page_files() -> list[Path]:
    """Return the files of the English documentation, without the pages for contributors."""
    top = installed("docs")
    paths = sorted([*top.glob("*.md"), *(top / "tutorials").glob("*.md")])
    return [path for path in paths if path.name.count(".") == 1 and path.stem != "promises"]
