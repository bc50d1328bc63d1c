"""`paceline compute`: targets, their state and their faults, as a user types it."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, section, tables
from tests.helpers import write_program

TOY = Path(__file__).parents[1] / "targets" / "toy.py"


@pytest.fixture
def compute(cli):
    """`paceline compute ...`, with packages installed that bring the kinds `toy` and `plain`, and one that is broken."""
    site = cli.folder / "site"
    (site / "toykind-1.0.dist-info").mkdir(parents=True)
    shutil.copy(TOY, site / "toykind.py")
    (site / "toykind-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toykind\nVersion: 1.0\n")
    (site / "toykind-1.0.dist-info" / "entry_points.txt").write_text(
        "[paceline.targets]\ntoy = toykind:ToyTarget\nplain = toykind:PlainTarget\nbroken = toykind:NoSuchClass\n"
    )
    cli.environment["PYTHONPATH"] = str(site)

    def call(*words, **options):
        return cli("compute", *words, **options)

    return call


def test_compute_add_with_a_setting_that_slurm_refuses_neither_adds_nor_changes_a_target(compute, cli):
    sinfo = "#!/bin/sh\n[ \"$1\" = -p ] || printf 'main\\nshort\\n'\n"
    cli.environment["PATH"] = f"{write_program(cli.folder / 'bin' / 'sinfo', sinfo).parent}:{os.environ['PATH']}"
    words = ("add", "cluster", "--kind", "slurm", "--partition", "mian")
    done = compute(*words, code=2)
    assert "Slurm has no partition 'mian'; it has main, short." in done.stderr
    assert done.stdout == ""
    assert not list((cli.folder / ".paceline/compute").glob("*"))
    compute("add", "cluster", "--kind", "slurm", "--time", "10", "--no-check")
    compute(*words, "--replace", code=2)
    assert cli.json("compute", "show", "cluster")["settings"] == {"time": "10"}


def test_compute_target_is_added_listed_shown_and_removed(compute, cli):
    nasty = 'a\'b "c"; $(touch x) ü'
    done = compute("add", "lab", "--kind", "toy", "--nodes=3", "--label", nasty)
    assert done.stdout == f"lab: toy nodes=3 label={nasty}\n"
    assert done.stderr == "3 of 3 nodes up, 12 cores, 6 GPUs\n"
    stored = json.loads((cli.folder / ".paceline/compute/lab.json").read_text())
    assert stored == {"name": "lab", "kind": "toy", "settings": {"nodes": 3, "label": nasty}}

    row = compute("list").stdout.splitlines()[2]
    assert re.split(r"  +", row) == ["lab", "toy", "up", "3", "9 of 12", "0 of 6", "5"]
    listed = cli.json("compute", "list")
    assert [target["name"] for target in listed["targets"]] == ["local", "lab"]
    assert listed["targets"][0]["state"] == "up"
    assert listed["targets"][1]["status"]["nodes"] == 3

    shown = compute("show", "lab").stdout
    for text in ("label:     a'b", "Jobs:        1 running, 5 waiting", "toy2  up     3 of 4"):
        assert text in shown
    told = cli.json("compute", "show", "lab")
    assert (told["settings"]["label"], told["status"]["queued"], len(told["status"]["nodes"])) == (nasty, 5, 3)

    assert "was removed from this workspace's compute targets" in compute("remove", "lab").stdout
    assert [target["name"] for target in cli.json("compute", "list")["targets"]] == ["local"]
    assert not (cli.folder / "x").exists()


def test_compute_add_help_shows_the_options_of_the_given_target_kind(compute):
    shown = compute("add", "--kind", "toy", "--help").stdout
    assert "--label TEXT" in shown
    assert "a text (required)" in shown
    assert "how many nodes (default: 2)" in shown
    general = compute("add", "-h").stdout
    assert "Kinds: broken, kubernetes, local, plain, ray, sim, slurm, ssh, toy." in general
    assert "toykind:NoSuchClass can't be loaded" in general
    assert compute("add", code=2).stdout == general


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lab"], "--kind is missing. Say what the target is: --kind broken|kubernetes|local|"),
        (["--kind", "toy", "--label", "x"], "NAME is missing."),
        (["lab", "x y", "--kind", "toy"], "one NAME is taken, and 'lab', 'x y' stand alone."),
        (["lab", "--kind", "tory"], "there is no kind 'tory' of compute target. Did you mean 'toy'?"),
        (["lab", "--kind", "toy", "--lable", "x"], "kind 'toy' has no option --lable. Did you mean --label? There are: --nodes"),
        (["lab", "--kind", "toy"], "compute target 'lab' needs label (--label TEXT): a text."),
        (["lab", "--kind", "toy", "--label", "x", "--nodes", "0"], "nodes=0 is less than 1."),
        (["../lab", "--kind", "toy", "--label", "x"], "compute target name '../lab'"),
        (["local", "--kind", "toy", "--label", "x"], "'local' is this machine and always there."),
        (["lab", "--kind", "broken"], "toykind:NoSuchClass can't be loaded"),
    ],
)  # fmt: skip
def test_invalid_compute_add_call_is_refused_and_stores_no_target(compute, cli, words, message):
    done = compute("add", *words, code=2)
    assert done.stderr.startswith("paceline: error: ")
    assert message in done.stderr
    assert not (cli.folder / ".paceline/compute").exists()


def test_existing_target_is_replaced_only_with_replace(compute, cli):
    compute("add", "lab", "--kind", "toy", "--label", "x", "--no-check")
    assert "--replace" in compute("add", "lab", "--kind", "toy", "--label", "y", code=2).stderr
    assert compute("add", "--replace", "lab", "--kind", "toy", "--label", "y", "--no-check").stderr == ""
    assert cli.json("compute", "show", "lab")["settings"] == {"label": "y"}


def test_compute_add_warns_about_each_node_that_is_down_with_the_reason(compute):
    # Regression: for a node with a misspelled host name, the only message was `0 of 1 nodes up`.
    told = compute(
        "add", "lab", "--kind", "toy", "--label", "x", "--nodes", "5", "--broken", "down"
    ).stderr.splitlines()
    assert told == [
        "0 of 5 nodes up",
        *(f"paceline: warning: toy{index} is down: its spring is broken." for index in range(3)),
        "paceline: 2 more are down: `paceline compute show lab`.",
    ]


@pytest.mark.promise("target-does-answer-holds-up")
def test_unresponsive_target_is_added_with_a_warning_and_does_not_delay_listing_other_targets(compute, cli):
    done = compute("add", "off", "--kind", "toy", "--label", "x", "--broken", "status")
    assert "warning: off is kept, but can't be reached: the toy's engine is switched off." in done.stderr
    compute("add", "hung", "--kind", "toy", "--label", "x", "--broken", "hangs", "--no-check")
    compute("add", "dumb", "--kind", "plain")
    done = compute("list", "--timeout", "8")
    states = {line.split()[0]: line.split()[2] for line in done.stdout.splitlines()[1:]}
    assert states == {"local": "up", "dumb": "unknown", "hung": "unreachable", "off": "unreachable"}
    assert "paceline: hung: no answer in 8 s" in done.stderr
    assert "toykind:NoSuchClass can't be loaded" in done.stderr


def test_target_used_by_a_run_is_not_removed_unless_forced(compute, cli):
    compute("add", "here", "--kind", "local", "--no-check")
    run_id = cli.submit("import time; time.sleep(600)", "--compute", "here")
    cli.wait(run_id, "Running")
    refused = compute("remove", "here", code=2).stderr
    assert f"compute target 'here' is used by {run_id}. Cancel or wait for them, or give --force" in refused
    compute("remove", "here", "--force")
    compute("add", "here", "--kind", "local", "--no-check")
    cli("cancel", run_id, "--wait")
    compute("remove", "here")
    assert cli.wait(run_id) == "Canceled"


def test_compute_show_doctor_and_remove_refuse_an_unknown_target(compute):
    for verb in ("show", "doctor"):
        assert "there is no compute target 'locl'. Did you mean 'local'?" in compute(verb, "locl", code=2).stderr
    assert "no compute target 'lab' in the workspace" in compute("remove", "lab", code=2).stderr
    assert "it can't be removed" in compute("remove", "local", code=2).stderr


def test_compute_login_is_refused_for_kinds_without_login_and_outside_a_terminal(compute):
    assert "of kind 'local', which needs no login" in compute("login", "local", code=2).stderr
    compute("add", "hosts", "--kind", "ssh", "--hosts", "nowhere.invalid", "--no-check")
    assert "a login needs a person at a terminal" in compute("login", "hosts", code=2).stderr


@pytest.mark.promise("doctor-names-node-do-gives")
def test_doctor_reports_failures_and_exits_with_1(compute, cli):
    compute("add", "lab", "--kind", "toy", "--label", "x", "--broken", "nodes", "--no-check")
    done = compute("doctor", "lab", code=1)
    assert "warn: plug-ins on broken: compute targets of kind 'broken' can't be used" in done.stdout
    assert "ok: status: 2 of 2 nodes up, 5 jobs waiting" in done.stdout
    assert "fail: reach: the toy box is empty. Fix this first: without it, no run gets nodes." in done.stdout
    assert done.stderr == "2 ok, 1 to look at, 1 failed\n"
    told = json.loads(compute("doctor", "lab", "--json", code=1).stdout)
    assert (told["target"], told["kind"], told["result"]) == ("lab", "toy", "fail")
    assert told["findings"][-1]["check"] == "reach"


def test_compute_doctor_fails_if_the_target_gives_no_node_in_the_given_time(compute):
    compute("add", "lab", "--kind", "toy", "--label", "x", "--broken", "waits", "--no-check")
    done = compute("doctor", "lab", "--wait", "1", code=1)
    assert "fail: reach: no nodes in 1 s: the queue is long, or a node hangs." in done.stdout


def test_compute_doctor_fails_for_a_stored_target_with_an_invalid_setting(compute, cli):
    compute("add", "lab", "--kind", "toy", "--label", "x", "--no-check")
    stored = cli.folder / ".paceline/compute/lab.json"
    stored.write_text(json.dumps({"name": "lab", "kind": "toy", "settings": {"label": "x", "nodes": 0}}))
    done = compute("doctor", "lab", code=1)
    assert "fail: settings: nodes=0 is less than 1. Give 1 or more. `paceline compute add lab --kind toy" in done.stdout


def test_doctor_prints_a_table_and_next_steps_on_a_terminal(compute, cli):
    compute("add", "lab", "--kind", "toy", "--label", "x", "--broken", "nodes", "--no-check")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        cli.argv("compute", "doctor", "lab"),
        env=cli.environment,
        cwd=cli.folder,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    try:
        while data := os.read(master, 4096):
            shown += data
    except OSError:
        pass  # reading fails once the terminal's other end is closed
    os.close(master)
    assert process.wait(60) == 1
    lines = shown.decode().replace("\r", "").splitlines()
    table = [re.sub(r"\x1b\[[0-9;]*[mK]", "", line) for line in lines]
    header = next(index for index, line in enumerate(table) if "LEVEL" in line)
    assert re.search(r"LEVEL +CHECK +NODE +SEEN", table[header])
    assert table[-2].strip() == "-> Fix this first: without it, no run gets nodes."
    assert any("\x1b[31mfail" in line for line in lines)


def test_shell_completion_offers_the_names_of_compute_targets(compute, cli):
    compute("add", "lab", "--kind", "toy", "--label", "x", "--no-check")
    words = "paceline compute show "
    variables = {"_PACELINE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "3"}
    assert cli(env=variables).stdout.split() == ["plain,local", "plain,lab"]


def test_documentation_names_every_compute_command(compute):
    described = {row[0].split()[1].strip("`") for row in tables(section(DOCS / "command-line.md", "compute"))[0]}
    shown = compute("--help").stdout
    assert described == set(re.findall(r"^\W*(\w+)  ", shown.partition("Commands")[2], re.MULTILINE))
