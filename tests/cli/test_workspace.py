"""Which workspace a command means: PACELINE_WORKSPACE, the nearest paceline.toml, or ./.paceline."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Cli


def folder_of(cli: Cli, cwd: Path | None = None, **env: str) -> Path:
    """The workspace in which a run lands."""
    cli("run", "-q", cli.folder / cli.script(""), cwd=cwd, env=env)
    (run_json,) = cli.folder.rglob("run.json")
    return run_json.parent.parent.parent


def test_by_default_it_is_made_in_the_working_directory(cli: Cli) -> None:
    (cli.folder / "here").mkdir()

    assert folder_of(cli, cli.folder / "here") == cli.folder / "here" / ".paceline"
    assert (cli.folder / "here" / ".paceline" / ".gitignore").read_text() == "*\n"


def test_the_nearest_configuration_names_it_for_all_folders_below(cli: Cli) -> None:
    (cli.folder / "paceline.toml").write_text('[workspace]\npath = "team runs"\n')
    (cli.folder / "deep" / "er").mkdir(parents=True)

    assert folder_of(cli, cli.folder / "deep" / "er") == cli.folder / "team runs"


def test_a_configuration_without_a_path_means_the_folder_beside_it(cli: Cli) -> None:
    (cli.folder / "paceline.toml").write_text("")
    (cli.folder / "deep").mkdir()

    assert folder_of(cli, cli.folder / "deep") == cli.folder / ".paceline"


def test_the_variable_stands_above_the_configuration(cli: Cli) -> None:
    (cli.folder / "paceline.toml").write_text('[workspace]\npath = "configured"\n')

    assert folder_of(cli, PACELINE_WORKSPACE=str(cli.folder / "named")) == cli.folder / "named"


def test_a_variable_that_is_set_to_nothing_names_none(cli: Cli) -> None:
    assert folder_of(cli, PACELINE_WORKSPACE="") == cli.folder / ".paceline"


def test_a_configuration_that_can_not_be_read_is_named(cli: Cli) -> None:
    (cli.folder / "paceline.toml").write_text("path = [\n")
    done = cli("list", code=2)

    assert f"'{cli.folder / 'paceline.toml'}' can't be read: " in done.stderr
    assert "Mend it or remove it." in done.stderr


def test_a_worker_that_calls_the_command_line_means_its_own_workspace(cli: Cli) -> None:
    # The script works in a copy of its source, deep in the workspace.
    script = cli.script(
        f"""
        import subprocess
        subprocess.run([{cli.argv()[0]!r}, "list"], check=True)
        """
    )
    done = cli("run", "-q", script)

    assert [line.split()[0] for line in done.stdout.splitlines()] == ["RUN", *cli.run_ids()]
