"""The verbs of the command line, with their modules and help.

This table repeats the first sentence of each verb's help, because a verb's module is imported only for a call.
"""

from __future__ import annotations

#: First command of a section in `paceline --help` -> the section's title.
SECTIONS = {
    "init": "Start here",
    "run": "Run",
    "status": "Look at runs",
    "top": "While a run goes on",
    "model": "Models and services",
    "compute": "Machines, packages and data",
    "rename": "Housekeeping",
}

#: Commands that only show something. They also work in an untrusted workspace, because they start no processes for its runs.
SHOWING = frozenset(
    {
        *(
            "status",
            "list",
            "show",
            "logs",
            "metrics",
            "diff",
            "compare",
            "usage",
            "export",
            "report",
            "files",
            "download",
            "bug-report",
        ),
        *(
            f"{verb} {word}"
            for verb in ("model", "service", "env", "data", "template", "schedule", "account")
            for word in ("list", "show")
        ),
        *("sweep show", "sweep best", "pipeline show", "service logs"),
    }
)

#: Command -> its function (or the module of its subcommands) in the package `paceline.cli`, and its help text, in --help's order.
VERBS: dict[str, tuple[str, str]] = {
    "init": ("guide.init", "Write a folder with a first script that runs."),
    "examples": ("guide.examples", "List the examples, or copy one to a folder."),
    "docs": ("guide.docs", "Print a page of the documentation, or the list of pages."),
    "run": ("quick.run", "Submit a script and follow it to its end."),
    "submit": ("quick.submit", "Submit a script and return at once with the run's id."),
    "rerun": ("run.rerun", "Submit a run's job again, with the same source and packages."),
    "check": ("check.check", "Compare a script's first steps on one process and on several."),
    "dev": ("sessions.dev", "Start a session on a node: JupyterLab, a shell, or ssh."),
    "sweep": ("sweep", "Tune hyperparameters over many runs."),
    "pipeline": ("pipeline", "Run steps in the order of their data."),
    "template": ("template", "Keep job files by name, which run with other values."),
    "schedule": ("schedule", "Start runs at times, on new versions and after other runs."),
    "status": ("read.status", "Show the state of a run."),
    "list": ("read.list_runs", "List the workspace's runs, newest first."),
    "show": ("read.show", "Show a run: its job, attempts, metrics, files, and failure."),
    "logs": ("logs.logs", "Print the logs of a run's workers."),
    "metrics": ("metrics.metrics", "Show metrics of runs side by side."),
    "diff": ("diff.diff", "Compare two runs: parameters, code, packages, data, metrics."),
    "compare": ("diff.compare_runs", "Show any number of runs in one table, with what differs first."),
    "files": ("files.files", "List a run's files with their sizes: outputs, logs, uploads."),
    "download": ("files.download", "Copy files of a run to a folder."),
    "ui": ("ui.ui", "Show the workspace in a browser: runs, curves, logs, files."),
    "account": ("account", "Make tokens for scripts, and print who changed what."),
    "report": ("report.report", "Write runs into one HTML file, which needs no server."),
    "export": ("export.export", "Export metrics of runs to CSV, Parquet, TensorBoard or MLflow."),
    "import": ("export.import_runs", "Import the runs of another tracker's store."),
    "relay": ("export.relay", "Pass the metrics of a run on to MLflow or W&B."),
    "tensorboard": ("export.tensorboard", "Start TensorBoard on runs, with all their metrics."),
    "usage": ("diff.usage", "Sum up the core hours and GPU hours that runs used and lost."),
    "top": ("top.top", "Watch the load of a run's nodes and workers."),
    "stacks": ("top.stacks", "Show where each worker of a run is now."),
    "profile": ("top.profile", "Sample a run's workers, to see where they spend their time."),
    "exec": ("cancel.execute", "Run a command on a worker's node, with its variables."),
    "forward": ("sessions.forward", "Open a tunnel to a port on a worker's node."),
    "cancel": ("cancel.cancel", "End runs, after a grace period for their workers."),
    "model": ("model", "Register, list, show, alias, verify, copy and push models."),
    "serve": ("serve.serve", "Serve a model in the foreground."),
    "service": ("service", "Deploy, update, call and stop services, which serve models."),
    "package": ("serve.package", "Write a folder that serves a model anywhere."),
    "compute": ("compute", "Add, list, show, remove and examine compute targets."),
    "queue": ("queue.queue", "Show for each machine what runs, who waits and why."),
    "share": ("queue", "Share this machine among its users, and check the shares file."),
    "env": ("env", "List, show, build and prune environments."),
    "data": ("data", "List, add and remove datastores, move files, prune the cache."),
    "azureml": ("azureml", "Check which parts of a program for the Azure ML SDK run here."),
    "rename": ("read.rename", "Give a run another display name."),
    "note": ("read.note", "Write notes on a run in Markdown, or print them."),
    "comment": ("read.comment", "Comment on a run, or print its comments."),
    "tag": ("read.tag", "Set or remove tags of a run, and print its tags."),
    "archive": ("read.archive", "Leave runs out of lists."),
    "rm": ("remove.rm", "Move ended runs to the trash, which keeps them for 7 days."),
    "restore": ("remove.restore", "Bring deleted runs back from the trash, or list the trash."),
    "backup": ("backup", "Back the workspace up to a datastore, and restore it."),
    "prune": ("remove.prune", "Remove old runs and unused snapshots, environments and data."),
    "trust": ("remove.trust", "Trust a workspace that you did not make on this machine."),
    "bug-report": ("diff.report", "Print the facts for a bug report."),
}
