"""Settings of compute targets: from Python and from a command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.errors import TargetError
from paceline.targets.configured import kind_class
from paceline.targets.options import Option, check_settings, help_lines, options_of, parse_words, setting

OPTIONS = (
    Option("hosts", "file of hosts", type=Path),
    Option("partition", "where jobs go", is_required=True),
    Option("time_limit", "minutes", type=int, default=60),
    Option("share", "part of a node", type=float, least=0.1),
    Option("extra", "more words", type=list),
    Option("requeue", "start over", type=bool, default=True),
    Option("mode", "how", choices=("fast", "slow")),
)


def test_checked_target_settings_have_a_value_for_every_option():
    assert check_settings("toy", OPTIONS, {"partition": "gpu", "extra": ["--a b"], "share": 1}) == {
        "hosts": None,
        "partition": "gpu",
        "time_limit": 60,
        "share": 1,
        "extra": ["--a b"],
        "requeue": True,
        "mode": None,
    }


def test_dataclass_declares_its_options_in_its_fields():
    @dataclass(frozen=True, kw_only=True)
    class ToySettings:
        name: str
        hosts: str | None = setting("file of hosts", Path)
        share: float = setting("part of a node", float, 0.5, least=0.1)
        extra: Sequence[str] = setting("more words", list)

    assert options_of(ToySettings) == (
        Option("hosts", "file of hosts", Path),
        Option("share", "part of a node", float, 0.5, least=0.1),
        Option("extra", "more words", list, ()),
    )
    assert ToySettings(name="toy", share=1.0) == ToySettings(name="toy", hosts=None, share=1.0, extra=())


def test_a_default_list_is_not_shared_between_targets():
    options = (Option("extra", "more", type=list, default=["a"]),)
    check_settings("toy", options, {})["extra"].append("b")
    assert check_settings("toy", options, {}) == {"extra": ["a"]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "compute target 'lab' needs partition (--partition TEXT): where jobs go."),
        ({"partition": "x", "partitoin": 1}, "has no setting 'partitoin'. Did you mean partition? There are: hosts, partition"),
        ({"partition": 3}, "partition=3 is not a text. It is: where jobs go."),
        ({"partition": "x", "time_limit": "60"}, "time_limit='60' is not a whole number"),
        ({"partition": "x", "time_limit": True}, "time_limit=True is not a whole number"),
        ({"partition": "x", "share": "half"}, "share='half' is not a number"),
        ({"partition": "x", "share": 0.05}, "share=0.05 is not 0.1 or more. It is: part of a node."),
        ({"partition": "x", "share": float("inf")}, "share=inf is not a finite number"),
        ({"partition": "x", "share": float("nan")}, "share=nan is not a finite number"),
        ({"partition": "x", "requeue": 1}, "requeue=1 is not true or false"),
        ({"partition": "x", "extra": "a"}, "extra='a' is not a list of texts, such as [\"extra1\", \"extra2\"]"),
        ({"partition": "x", "extra": ["a", 1]}, "is not a list of texts"),
        ({"partition": "x", "mode": "quick"}, "mode='quick' is not one of fast, slow"),
        ({"partition": "x\n#SBATCH --uid=0"}, "has a line break or control character"),
        ({"partition": "x", "extra": ["a\x00"]}, "has a line break or control character"),
    ],
)  # fmt: skip
def test_wrong_setting_is_reported_with_the_rule_and_known_settings(settings, message):
    with pytest.raises(TargetError) as caught:
        check_settings("toy", OPTIONS, settings, "lab")
    assert message in str(caught.value)


def test_command_line_words_are_parsed_into_target_settings_and_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--hosts", "h.txt", "lab", "--partition=gpu,cpu", "--time-limit", "5", "--share", "0.5"]
    words += ["--extra", "a b; rm -rf $HOME", "--extra=--exclusive", "--no-requeue", "--mode", "fast", "--", "--alone"]
    assert parse_words("toy", OPTIONS, words) == (
        {
            "hosts": str(tmp_path / "h.txt"),
            "partition": "gpu,cpu",
            "time_limit": 5,
            "share": 0.5,
            "extra": ["a b; rm -rf $HOME", "--exclusive"],
            "requeue": False,
            "mode": "fast",
        },
        ["lab", "--alone"],
    )


def test_option_names_accept_dashes_or_underscores():
    assert parse_words("toy", OPTIONS, ["--time_limit", "5", "--requeue"])[0] == {"time_limit": 5, "requeue": True}
    assert parse_words("toy", OPTIONS, ["--requeue=no"])[0] == {"requeue": False}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partitoin", "x"], "kind 'toy' has no option --partitoin. Did you mean --partition? There are: --hosts,"),
        (["--no-partition"], "kind 'toy' has no option --no-partition"),
        (["--partition"], "--partition needs a value (TEXT): where jobs go."),
        (
            ["--hosts", "--partition", "x"],
            "--hosts needs a value (FILE): file of hosts; '--partition' is the next option.",
        ),
        (["--time-limit", "soon"], "--time-limit 'soon' is not a whole number. It is: minutes."),
        (["--share", "half"], "--share 'half' is not a number"),
        (["--requeue=maybe"], "--requeue='maybe' is neither true nor false"),
    ],
)
def test_invalid_target_option_on_the_command_line_is_refused_with_the_rule(words, message):
    with pytest.raises(TargetError) as caught:
        parse_words("toy", OPTIONS, words)
    assert message in str(caught.value)


def test_help_lists_required_options_first_with_allowed_values():
    assert help_lines(OPTIONS)[0] == ("--partition TEXT", "where jobs go (required)")
    lines = dict(help_lines(OPTIONS))
    assert lines["--time-limit N"] == "minutes (default: 60)"
    assert lines["--extra TEXT"] == "more words (may be repeated)"
    assert lines["--mode fast|slow"] == "how"


#: Kind of target whose nodes are other machines -> its settings.
ELSEWHERE = {"ssh": {"hosts": ["a"]}, "slurm": {}, "ray": {}}


@pytest.mark.promise("how-long-silent-node-waited")
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_silence_limit_below_1_second_is_refused(kind):
    make = kind_class(kind)
    make("lab", {**ELSEWHERE[kind], "silence_s": 1})
    for value, rule in [(0.5, "not 1 or more"), ("3", "not a number"), (float("nan"), "not a finite number")]:
        with pytest.raises(TargetError, match=rf"silence_s=.* is {rule}. It is: seconds without a word"):
            make("lab", {**ELSEWHERE[kind], "silence_s": value})
