"""`paceline data`: stores, their files, and the cache, as a user types it."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex

import pytest

from tests.docs.pages import DOCS, blocks
from tests.engines.conftest import require_engine
from tests.helpers import write_tree


@pytest.fixture
def data(cli):
    """`paceline data ...`, with a cache of the test's own."""
    cli.environment["PACELINE_DATA_CACHE"] = str(cli.folder / "cache")

    def call(*words, **options):
        return cli("data", *words, **options)

    return call


def test_datastore_is_added_listed_and_removed_by_the_data_command(data, cli):
    data("add", "lab", "files", "--default")
    stores = cli.json("data", "list")["datastores"]
    assert stores == [
        {"name": "default", "kind": "local", "url": str(cli.folder / ".paceline/data"), "is_default": False},
        {"name": "lab", "kind": "local", "url": str(cli.folder / "files"), "is_default": True},
    ]
    assert "lab (default)  local" in data("list").stdout
    data("remove", "lab")
    assert [store["name"] for store in cli.json("data", "list")["datastores"]] == ["default"]


def test_data_add_stores_option_values_as_json_and_credentials_as_secret_references(data, cli):
    words = ["--option", "endpoint_url=http://127.0.0.1:9", "--option", 'client_kwargs={"region_name": "eu"}']
    data("add", "lab", "s3://bucket/x", *words, "--option", "anon=false", "--credential", "secret=env:LAB_SECRET")
    assert json.loads((cli.folder / ".paceline/datastores/lab.json").read_text()) == {
        "url": "s3://bucket/x",
        "options": {"endpoint_url": "http://127.0.0.1:9", "client_kwargs": {"region_name": "eu"}, "anon": False},
        "credentials": {"secret": "env:LAB_SECRET"},
    }


@pytest.mark.parametrize(
    "words",
    [
        ["s3://bucket", "--option", "secret=planted"],
        ["s3://bucket", "--credential", "secret=planted"],
        ["s3://bucket", "--credential", "planted"],
        ["s3://bucket", "--option", "planted"],
        ["sftp://me:planted@host/x"],
    ],
)
def test_data_add_refuses_a_secret_on_the_command_line_and_does_not_print_it(data, words):
    done = data("add", "lab", *words, code=2)
    assert done.stderr.startswith("paceline: error: ")
    assert "planted" not in done.stdout + done.stderr


def test_data_commands_upload_list_and_download_files_of_a_datastore(data, cli):
    write_tree(cli.folder, {"src/a.csv": "1", "src/sub dir/ü.csv": "22"})
    data("upload", "src", "default:train")
    data("upload", "src/a.csv", "default:one")
    assert [info["path"] for info in cli.json("data", "ls", "default")] == [
        "one/a.csv", "train/a.csv", "train/sub dir/ü.csv",
    ]  # fmt: skip
    shown = data("ls", "default:train/**/*.csv")
    assert shown.stdout.splitlines() == ["      1 B  train/a.csv", "      2 B  train/sub dir/ü.csv"]
    assert shown.stderr == "2 files, 3 B\n"
    assert data("download", "default:train", "out").stderr == "2 files copied to out.\n"
    assert (cli.folder / "out/train/sub dir/ü.csv").read_text() == "22"
    write_tree(cli.folder, {"src/a.csv": "new"})
    data("upload", "src", "default:train", "--overwrite")
    data("download", "default:train", "out", "--overwrite")
    assert (cli.folder / "out/train/a.csv").read_text() == "new"


def test_data_upload_names_broken_links_and_special_files(data, cli):
    write_tree(cli.folder, {"src/a.csv": "1"})
    (cli.folder / "src/nowhere").symlink_to("no")
    os.mkfifo(cli.folder / "src/pipe")
    done = data("upload", "src", "default:train")
    assert "Left out, because they are special files or broken links: nowhere, pipe." in done.stderr
    assert [info["path"] for info in cli.json("data", "ls", "default")] == ["train/a.csv"]


def test_data_cache_is_shown_and_data_prune_refuses_an_invalid_size(data, cli):
    found = cli.json("data", "cache")
    assert (found["folder"], found["files"], found["bytes"]) == (str(cli.folder / "cache"), 0, 0)
    assert found["limit_bytes"] > 0
    assert f"Folder:  {cli.folder}/cache" in data("cache").stdout
    assert data("prune", "--to", "1GB").stdout == "0 B removed.\n"
    assert "'lots' is not a size" in data("prune", "--to", "lots", code=2).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ls", "nowhere"], "there is no datastore 'nowhere'"),
        (["ls", "a/b"], "must be STORE or STORE:PATH"),
        (["ls", "default:no/such"], "there is nothing at 'no/such'"),
        (["ls", "default:../x"], "leaves datastore 'default'"),
        (["upload", "missing", "default"], "there is no 'missing' here"),
        (["remove", "nowhere"], "there is no datastore 'nowhere'"),
        (["add", "lab", "ftp://x/y"], "is of no kind that is known"),
    ],
)
def test_invalid_data_command_prints_one_error_line(data, words, message):
    done = data(*words, code=2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_data_commands_of_the_documentation_page_run_and_print_the_shown_output(data, cli):
    require_engine("s3fs", importlib.util.find_spec("s3fs"))
    write_tree(cli.folder, {"photos/sub/a.png": "1", "photos/b.txt": "2"})
    shown = []
    for block in blocks(DOCS / "data.md", "console"):
        for line in block.text.splitlines():
            program, *words = shlex.split(line.removeprefix("$ "))
            assert program == "paceline"
            # The page reads /mnt/lab, which this machine does not have. So pass a folder of this test.
            shown.append(cli(*[str(cli.folder / "mnt") if word == "/mnt/lab" else word for word in words]).stdout)
    assert len(shown) == 9
    assert shown[2] == "      1 B  train/sub/a.png\n"
    assert (cli.folder / "copy/train/b.txt").read_text() == "2"
