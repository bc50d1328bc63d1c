"""The verbs of the command line, with their places and help.

A verb's module is imported only when the verb is called, so the table repeats the first paragraph of its help. A test compares.
"""

from __future__ import annotations

#: Sections of `paceline --help`, by the first verb in each.
SECTIONS = {
    "run": "Runs",
    "status": "Look at runs",
    "cancel": "While a run goes on",
    "rm": "Clean up",
    "model": "Models, sweeps, pipelines and services",
    "env": "Environments, data and machines",
}

#: Verbs that only show. They work in an untrusted workspace, too, and start nothing of it.
SHOWING = frozenset(
    {
        *("status", "list", "show", "logs", "metrics", "diff", "usage", "export", "files", "download", "bug-report"),
        *(f"{verb} {word}" for verb in ("model", "service", "env", "data") for word in ("list", "show")),
        *("sweep show", "sweep best", "pipeline show", "service logs"),
    }
)

#: Verb -> its function in `paceline.cli`, or the module with its own `verbs`, and its help. In the order of `--help`.
#: lists them.
VERBS: dict[str, tuple[str, str]] = {
    "run": ("quick.run", "Submit a script and follow it to its end. Exits as the script did."),
    "submit": ("quick.submit", "Submit a script and return at once with the run's id."),
    "rerun": (
        "run.rerun",
        "Submit a run's job again, with the same source and the same versions of packages.",
    ),
    "check": (
        "check.check",
        "Compare a script's first steps on one process with those on several. Exits with 0 if equal, else 1.",
    ),
    "status": ("read.status", "Show the state of a run."),
    "list": ("read.list_runs", "List the workspace's runs, newest first."),
    "show": ("read.show", "Show a run: its job, attempts, metrics, files, and failure."),
    "rename": ("read.rename", "Give a run another display name. Its id stays."),
    "logs": (
        "logs.logs",
        "Print the logs of a run's workers from the start. With several workers, each line begins with its rank.",
    ),
    "metrics": (
        "metrics.metrics",
        "Show metrics of runs side by side: last, least and greatest value of each. With --name, show all values.",
    ),
    "diff": (
        "diff.diff",
        "Compare two runs: parameters, code, environment, data, topology, and the first step at which metrics differ.",
    ),
    "usage": ("diff.usage", "Sum up the core hours and GPU hours that runs used and lost."),
    "export": (
        "export.export",
        "Write the metrics of runs for other tools: CSV, Parquet, TensorBoard's event files, or an MLflow server.",
    ),
    "tensorboard": (
        "export.tensorboard",
        "Start TensorBoard on runs, with all their metrics. It follows runs that go on; Ctrl-C ends it.",
    ),
    "files": ("files.files", "List a run's files with their sizes: outputs, logs and uploads."),
    "download": (
        "files.download",
        "Copy files of a run to a folder, under their names. A copy appears complete or not at all.",
    ),
    "bug-report": (
        "diff.report",
        "Print versions and the place of a failure for a bug report. No arguments, variables, logs, hosts or paths.",
    ),
    "cancel": (
        "cancel.cancel",
        "End runs: send their workers SIGTERM, then SIGKILL after the grace period. Ended runs stay unchanged.",
    ),
    "exec": (
        "cancel.execute",
        "Run a command on a worker's node, in its working folder and container, with its environment variables.",
    ),
    "ui": ("ui.ui", "Show the workspace in a browser: runs, curves, logs and files. Ctrl-C ends it."),
    "stacks": (
        "top.stacks",
        "Show where each worker of a run is now: stacks of its threads, and which ranks wait for which.",
    ),
    "top": (
        "top.top",
        "Watch the load of a run's nodes and workers, and how each rank spends its time. Ctrl-C ends it.",
    ),
    "profile": (
        "top.profile",
        "Sample the stacks of a run's workers for some seconds, to see where time is spent.",
    ),
    "rm": (
        "remove.rm",
        "Remove ended runs for good: records, logs, metrics and outputs. Files that they stored elsewhere stay.",
    ),
    "prune": (
        "remove.prune",
        "Remove old runs, unused snapshots and environments, and cached data.",
    ),
    "trust": (
        "remove.trust",
        "Trust a workspace that was not made by you on this machine: a group's, an unpacked one, a copy.",
    ),
    "model": ("model", "Register, list, show, alias, verify, copy and push models."),
    "serve": (
        "serve.serve",
        "Serve a model in the foreground: /score, /v2/models/NAME/infer, /metrics. Ctrl-C ends it.",
    ),
    "sweep": ("sweep", "Tune hyperparameters over many runs."),
    "pipeline": ("pipeline", "Run steps in the order of their data."),
    "package": (
        "serve.package",
        "Write a folder that serves a model anywhere: Dockerfile, exact versions, model, script and server.",
    ),
    "service": ("service", "Deploy, update, call and stop services: models that answer requests."),
    "env": ("env", "List, show, build and prune environments."),
    "data": ("data", "List, add and remove datastores, move files, and prune the cache."),
    "azureml": ("azureml", "Check which parts of a program for the Azure ML SDK run here."),
    "compute": ("compute", "Add, list, show, remove and examine compute targets."),
}
