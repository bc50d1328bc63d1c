"""The verbs of the command line: where each lives, and its line in `paceline --help`.

A verb's module is imported when the verb is called (`paceline.cli.verb_group`), so what `--help` says of it stands here:
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
    "run": ("run.run", "Submit a script and follow it to its end. Exits as the script did."),
    "submit": ("run.submit", "Submit a script and return at once with the run's id."),
    "rerun": (
        "run.rerun",
        "Submit a run's job again, with the source and the exact versions of the packages as they were then.",
    ),
    "check": (
        "check.check",
        "Compare a script's first steps on one process with those on several. Exits with 0 where they are equal, else 1.",
    ),
    "status": ("read.status", "How a run stands."),
    "list": ("read.list_runs", "The runs of the workspace, newest first."),
    "show": ("read.show", "All that is known of a run: its job, attempts, metrics, files, and why it failed."),
    "rename": ("read.rename", "Give a run another name for people. Its id stays."),
    "logs": (
        "logs.logs",
        "What a run's workers print, from the start, in the order it was written; of several workers with the rank in front.",
    ),
    "metrics": (
        "metrics.metrics",
        "The metrics of runs: last, least and greatest value of each, or with --name all values; several runs side by side.",
    ),
    "diff": (
        "diff.diff",
        "How two runs differ: parameters, code, environment, data, topology, and the first step at which metrics part.",
    ),
    "usage": ("usage.usage", "What runs have held of cores and GPUs, in hours, and how much of it was lost."),
    "export": (
        "export.export",
        "Write the metrics of runs for other tools: CSV, Parquet, TensorBoard's event files, or a server of MLflow's.",
    ),
    "tensorboard": (
        "export.tensorboard",
        "TensorBoard over runs, which it follows while they run: their event files, and all their other metrics. "
        "Ctrl-C ends it.",
    ),
    "files": ("files.files", "The files of a run, with their sizes: its outputs and logs, and what was uploaded."),
    "download": (
        "files.download",
        "Copy files of a run to a folder, under their names. A file is there whole, or not at all.",
    ),
    "cancel": (
        "cancel.cancel",
        "End runs: SIGTERM to their workers, after the grace period SIGKILL. A run that has ended stays as it is.",
    ),
    "exec": (
        "execute.execute",
        "Run a command on a worker's node, in its working folder and container, with its environment variables.",
    ),
    "ui": ("ui.ui", "Show the workspace in a browser: runs as they go, their curves, logs and files. Ctrl-C ends it."),
    "stacks": (
        "stacks.stacks",
        "Where each worker of a run is at this moment: the stacks of all its threads, and who waits for whom.",
    ),
    "top": (
        "top.top",
        "What the nodes and workers of a run take at this moment, and how the time of each rank goes. Ctrl-C ends it.",
    ),
    "profile": (
        "profile.profile",
        "Where the time of a run's workers goes: their stacks, sampled for some seconds while they run on.",
    ),
    "bug-report": (
        "bug_report.report",
        "What to send with a fault: versions, and where a run failed. No arguments, variables, logs, hosts or paths.",
    ),
    "rm": (
        "remove.rm",
        "Remove runs that have ended, for good: their records, logs, metrics and outputs. What they stored elsewhere stays.",
    ),
    "prune": (
        "remove.prune",
        "Remove what is needed no longer: old runs, snapshots and environments that no run uses, cached data. "
        "Never what a living run uses, nor a run with the tag `keep`, nor one that made a model.",
    ),
    "trust": (
        "remove.trust",
        "Use a workspace that you have not made on this machine: a group's, an unpacked one, a copy.",
    ),
    "model": ("model", "Models: register, list, show, alias, verify, copy and push what runs made."),
    "serve": (
        "serve.serve",
        "Serve a model in the foreground: /score, /v2/models/NAME/infer, /metrics. Ctrl-C ends it.",
    ),
    "sweep": ("sweep", "Sweeps: hyperparameters tuned over runs."),
    "pipeline": ("pipeline", "Pipelines: steps that run in the order of their data."),
    "package": (
        "package.package",
        "Write a folder that serves a model away from here: Dockerfile, exact versions, model, script and server.",
    ),
    "service": ("service", "Services: models that answer requests."),
    "env": ("env", "Environments: list, show, build and prune them."),
    "data": ("data", "Datastores: list, add and remove them, move files; the cache."),
    "azureml": ("azureml", "Programs for the Azure ML SDK: what of them runs here."),
    "compute": ("compute", "Compute targets: add, list, show, remove and examine them."),
}
