"""Completion in the shell: verbs, options, and the ids of runs."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.cli.conftest import PROGRAM, Cli, Gallery


def completed(cli: Cli, words: str, position: int) -> list[str]:
    """Return the completions that bash gets for the word at `position` of these words."""
    variables = {"_PACELINE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    lines = cli(env=variables).stdout.splitlines()
    return [word for kind, _, word in (line.partition(",") for line in lines) if kind == "plain"]


@pytest.mark.parametrize("verb", ["logs", "status", "show", "cancel", "rerun"])
def test_run_ids_are_completed_newest_first(gallery: Gallery, verb: str) -> None:
    assert completed(gallery, f"paceline {verb} ", 2) == [gallery.bad, gallery.good]
    assert completed(gallery, f"paceline {verb} go", 2) == [gallery.good]
    assert completed(gallery, f"paceline {verb} x", 2) == []


def test_shell_completion_offers_commands_and_options_that_begin_with_the_typed_letters(gallery: Gallery) -> None:
    assert completed(gallery, "paceline s", 1) == [
        "submit",
        "sweep",
        "schedule",
        "status",
        "show",
        "stacks",
        "serve",
        "service",
        "share",
    ]
    assert "--backend" in completed(gallery, "paceline run --b", 2)
    assert completed(gallery, "paceline compute d", 2) == ["doctor"]


def test_shell_completion_prints_no_error_if_paceline_toml_is_invalid(cli: Cli) -> None:
    variables = {"_PACELINE_COMPLETE": "bash_complete", "COMP_WORDS": "paceline logs ", "COMP_CWORD": "2"}
    (cli.folder / "paceline.toml").write_text("not [ toml")
    done = cli(env=variables)

    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_bash_completes_commands_with_the_printed_script(gallery: Gallery) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    script = gallery(env={"_PACELINE_COMPLETE": "bash_source"}).stdout
    ask = f"""
        {script}
        COMP_WORDS=(paceline logs go) COMP_CWORD=2
        _paceline_completion {PROGRAM}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        [bash, "--norc", "-c", ask],
        env=gallery.environment,
        cwd=gallery.folder,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"{gallery.good}\n"
    assert "-F _paceline_completion paceline" in script


def test_shell_completion_offers_the_known_values_of_an_option(gallery: Gallery) -> None:
    def offered(words: str) -> list[str]:
        return completed(gallery, f"paceline {words}", len(words.split()) + words.endswith(" "))

    for verb in ("run", "submit"):
        assert offered(f"{verb} --compute l") == ["local"]
        assert offered(f"{verb} --backend ") == ["mpi", "gloo", "nccl", "ps", "tensorflow"]
        assert offered(f"{verb} --env PAT") == ["PATH"]
        assert offered(f"{verb} -e g") == ["good"]
    # The first id is a sweep and the second id is its trial. Neither number belongs to the experiment's name.
    for run_id in ("tuned_1700000000_00000001", "tuned_1700000000_00000001_12"):
        shutil.copytree(gallery.run_folder(gallery.good), gallery.run_folder(run_id))
    try:
        assert offered("list -e ") == ["bad", "good", "tuned"]
    finally:
        for folder in gallery.run_folder("x").parent.glob("tuned_*"):
            shutil.rmtree(folder)
    assert offered("list --status F") == ["Finalizing", "Failed"]
    assert offered("list --status comp") == ["completed"]
    assert offered("list --tag ") == ["a=1", "bare"]
    assert offered("compute doctor ") == ["local"]
    assert offered("data ls d") == ["default"]
    assert offered("run --environment ") == []


def test_shell_completion_imports_no_third_party_library_that_the_command_line_does_not_import(cli: Cli) -> None:
    code = """if True:
        import sys, paceline.cli.run
        before = set(sys.modules)
        from paceline.cli import completing as c
        for name in c._OFFERS:
            c.offer(name, "", {})
        loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*sorted(loaded - {"paceline", *sys.stdlib_module_names}))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=cli.folder, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_installing_shell_completion_twice_adds_only_one_line_to_the_startup_file_of_the_shell(
    cli: Cli, shell: str
) -> None:
    variables = {"SHELL": f"/usr/bin/{shell}"}
    assert cli("--install-completion", env=variables).stdout.startswith(f"Completion for {shell} is set up in ")
    start_file = cli.folder / f".{shell}rc"
    before = start_file.read_text() if shell != "fish" else ""
    cli("--install-completion", env=variables)
    if shell != "fish":
        assert start_file.read_text() == before
        assert before.count("source '") == 1
    assert "_PACELINE_COMPLETE" in cli("--show-completion", env=variables).stdout
    refused = cli("--show-completion", env={"SHELL": "/bin/tcsh"}, code=2).stderr
    assert "there is no completion for the shell 'tcsh'. Set SHELL to bash, zsh or fish." in refused
