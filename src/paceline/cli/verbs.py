"""The verbs of the command line: where each lives, and its line in `paceline --help`.

A verb's module is imported when the verb is called (`paceline.cli.parser`), so what `--help` says of it stands here:
the first paragraph of the verb's own help. A test compares the two.
"""

from __future__ import annotations

#: The sections of `paceline --help`, each with its first verb in `VERBS`.
SECTIONS = {
    "run": "Runs",
    "status": "Look at runs",
    "cancel": "While a run goes on",
    "rm": "Clean up",
    "model": "Models, sweeps, pipelines and services",
    "env": "Environments, data and machines",
}

#: Verbs, and words below a verb, that only show. They do so in a workspace from elsewhere, too, and start nothing of it.
SHOWING = frozenset(
    {
        *("status", "list", "show", "logs", "metrics", "diff", "usage", "export", "files", "download", "bug-report"),
        *(f"{verb} {word}" for verb in ("model", "service", "env", "data") for word in ("list", "show")),
        *("sweep show", "sweep best", "pipeline show", "service logs"),
    }
)

#: Verb -> its function in `paceline.cli`, or the module whose `verbs` are below it; and its help. In the order in which `--help`
#: lists them.
VERBS: dict[str, tuple[str, str]] = {
    "run": ("quick.run", "Submit a script and follow it to its end. Exits as the script did."),
    "submit": ("quick.submit", "Submit a script and return at once with the run's id."),
    "rerun": (
        "run.rerun",
        "Submit a run's job again, with the source and the exact versions of the packages as they were then.",
    ),
    "check": (
        "check.check",
        "Compare a script's first steps on one process with those on several. Exits with 0 where they are equal, else 1.",
    ),
    "status": ("read.status", "Show how a run stands."),
    "list": ("read.list_runs", "List the workspace's runs, newest first."),
    "show": ("read.show", "Show a run: its job, attempts, metrics, files, and why it failed."),
    "rename": ("read.rename", "Give a run another name for people. Its id stays."),
    "logs": (
        "logs.logs",
        "Print what a run's workers print, from the start; with several workers, each line has its rank in front.",
    ),
    "metrics": (
        "metrics.metrics",
        "Show metrics of runs side by side: last, least and greatest value of each; with --name, all values.",
    ),
    "diff": (
        "diff.diff",
        "Compare two runs: parameters, code, environment, data, topology, and the first step at which metrics differ.",
    ),
    "usage": ("diff.usage", "Sum up the core hours and GPU hours that runs used and lost."),
    "export": (
        "export.export",
        "Write the metrics of runs for other tools: CSV, Parquet, TensorBoard's event files, or a server of MLflow's.",
    ),
    "tensorboard": (
        "export.tensorboard",
        "Start TensorBoard on runs: it shows all their metrics and follows runs that go on. Ctrl-C ends it.",
    ),
    "files": ("files.files", "List a run's files with their sizes: outputs, logs and uploads."),
    "download": (
        "files.download",
        "Copy files of a run to a folder, under their names. A file is there whole, or not at all.",
    ),
    "bug-report": (
        "diff.report",
        "Print what to send with a bug report: versions, and where a run failed. No arguments, variables, logs, hosts or paths.",
    ),
    "cancel": (
        "cancel.cancel",
        "End runs: SIGTERM to their workers, after the grace period SIGKILL. A run that has ended stays as it is.",
    ),
    "exec": (
        "cancel.execute",
        "Run a command on a worker's node, in its working folder and container, with its environment variables.",
    ),
    "ui": ("ui.ui", "Show the workspace in a browser: runs as they go, their curves, logs and files. Ctrl-C ends it."),
    "stacks": (
        "top.stacks",
        "Show where each worker of a run is now: the stacks of its threads, and which ranks wait for which.",
    ),
    "top": (
        "top.top",
        "Watch the load of a run's nodes and workers, and how each rank spends its time. Ctrl-C ends it.",
    ),
    "profile": (
        "top.profile",
        "Sample the stacks of a run's workers for some seconds, to see where their time goes.",
    ),
    "rm": (
        "remove.rm",
        "Remove runs that have ended, for good: their records, logs, metrics and outputs. What they stored elsewhere stays.",
    ),
    "prune": (
        "remove.prune",
        "Remove old runs, snapshots and environments that no run uses, and cached data. "
        "Never what a living run uses, nor a run with the tag `keep`, nor one that made a model.",
    ),
    "trust": (
        "remove.trust",
        "Use a workspace that you have not made on this machine: a group's, an unpacked one, a copy.",
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
        "Write a folder that serves a model away from here: Dockerfile, exact versions, model, script and server.",
    ),
    "service": ("service", "Deploy, update, call and stop services: models that answer requests."),
    "env": ("env", "List, show, build and prune environments."),
    "data": ("data", "List, add and remove datastores, move files, and prune the cache."),
    "azureml": ("azureml", "Check which parts of a program for the Azure ML SDK run here."),
    "compute": ("compute", "Add, list, show, remove and examine compute targets."),
}
