"""Reports: runs in one file, with hostile texts, and without names."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.errors import UserError
from paceline.runs import tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.ui import bundle, report
from paceline.workspace import Workspace
from tests.cli.conftest import Cli
from tests.helpers import make_job
from tests.sweeps.made import add_trial, make_sweep
from tests.ui.conftest import HOSTILE, Place, log_values

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def run_with_values(place: Place, number: int = 1, **values: Any) -> RunFolder:
    folder = place.run(f"digits_170000000{number}_00000001", job=make_job(arguments=("--lr", f"0.{number}")), **values)
    log_values(folder, "loss", [3.0, 2.0, 1.0 / 3])
    log_values(folder, "val/acc", [0.5])
    return folder


def test_run_report_has_table_curves_notes_and_images(place: Place, tmp_path: Path) -> None:
    folder, other = run_with_values(place, display_name="first"), run_with_values(place, 2)
    tags_and_properties.set_name(folder.notes, "description", "A **good** run, [see](https://example.org) <b>")
    (folder.path / "outputs").mkdir(exist_ok=True)
    (folder.path / "outputs" / "x.png").write_bytes(PNG)
    log = MetricLog(folder.metric_log(1))
    log.other("image", "sample", "outputs/x.png")
    log.other("image", "gone", "outputs/gone.png")
    log.close()
    Workspace(place.path).report([folder.run_id, other.run_id], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "<strong>good</strong>" in text
    assert "&lt;b&gt;" in text
    assert f'src="data:image/png;base64,{base64.b64encode(PNG).decode()}"' in text
    assert text.count("<figure") == 1
    data = data_of(text)
    losses = [curve for curve in data["curves"] if curve["name"] == "loss"]
    assert [(curve["run"], curve["x"], curve["y"]) for curve in losses] == [
        (run, [0, 1, 2], [3.0, 2.0, 0.3333333]) for run in (0, 1)
    ]
    assert all(len(curve["t"]) == 3 for curve in losses)
    assert ["parameters", "lr", "", [0.1, 0.2]] in data["table"]["facts"]


def test_report_file_loads_nothing_from_other_hosts(place: Place) -> None:
    text = report.report_text([run_with_values(place)])
    plain = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)
    assert re.findall(r'(?:src|href|action)="(?!#)(?!data:)[^"]*"', plain) == []
    assert "style=" not in plain
    assert not re.search(r"\son\w+=", plain)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "unsafe" not in policy[1]
    assert "default-src &#39;none&#39;" in policy[1]
    # The policy allows exactly the scripts and the style of this file.
    found = re.findall(r"<(?:script|style)(?: type=\"module\")?>(.*?)</(?:script|style)>", text, re.DOTALL)
    allowed = {bundle.Inlined(one).allowed.replace("'", "&#39;") for one in found}
    assert allowed == set(re.findall(r"&#39;sha256-[^;]*&#39;", policy[1]))
    assert len(allowed) == 3


def test_hostile_texts_in_report_are_escaped(hostile: RunFolder) -> None:
    log_values(hostile, "</script><script>document.title='owned'</script>\u2028", [1.0])
    tags_and_properties.set_name(hostile.notes, "description", HOSTILE)
    text = report.report_text([hostile])
    assert "<script>document" not in text
    assert "</script><script>d" not in text
    assert "\u2028" not in text
    assert any(name["name"].startswith("</script>") for name in data_of(text)["names"])


def test_anonymous_report_contains_no_user_or_path_names(place: Place) -> None:
    secret = "s3cret"
    folder = place.run(
        f"{secret}_1700000001_00000001",
        job=make_job(
            arguments=(f"/home/{secret}/data", "--user", secret, "--lr", "0.1", "--deep"),
            environment_variables={f"{secret.upper()}_HOME": secret},
        ),
        display_name=f"run of {secret}",
        tags={secret: secret},
        submitted_by=secret,
        target=secret,
        source_directory=f"/home/{secret}",
        git={"commit": secret, "branch": secret, "repository_uri": f"git@{secret}"},
        warnings=(secret,),
        canceled_by=secret,
    )
    tags_and_properties.set_name(folder.notes, "description", secret)
    tags_and_properties.add_properties(folder.notes, {"owner": secret})
    log_values(folder, "loss", [1.0])
    log = MetricLog(folder.metric_log(1))
    log.other("image", secret, f"outputs/{secret}.png")
    log.scalar("text", secret)
    log.close()
    named, text = report.report_text([folder]), report.report_text([folder], anonymous=True)
    assert secret in named
    assert secret not in text.lower()
    assert str(place.path) not in text
    facts = {name: values for kind, name, _, values in data_of(text)["table"]["facts"] if kind == "parameters"}
    assert facts["lr"] == [0.1]
    assert facts["user"][0].startswith("text ")
    assert data_of(text)["starts"] == []
    assert "1970" not in text
    assert "20:" not in text.split("<main")[1].split("<script")[0]


def test_metrics_of_report_are_chosen_by_pattern(place: Place) -> None:
    folder = run_with_values(place)
    data = data_of(report.report_text([folder], metrics=["val/*"]))
    assert {curve["name"] for curve in data["curves"]} == {"val/acc"}
    assert {name for kind, name, *_ in data["table"]["facts"] if kind == "metrics"} == {"val/acc"}
    with pytest.raises(UserError, match=r"no metric of these runs matches 'los'. They have: loss, val/acc. Did you"):
        report.report_text([folder], metrics=["los"])


def test_report_larger_than_the_size_limit_is_refused_and_not_written(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_with_values(place)
    monkeypatch.setattr(report, "LARGEST", 1 << 10)
    with pytest.raises(UserError, match="Name fewer runs, or choose metrics"):
        report.write_report([folder], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
    with pytest.raises(UserError, match=r"1 to 200 runs, got 0"):
        report.report_text([])


def test_sweep_report_has_charts_and_its_anonymous_version_has_no_parameter_texts(place: Place) -> None:
    folders = ("/home/s3cret/a", "/home/s3cret/b")
    spec = SweepSpec(
        space=Space({"--lr": pl.uniform(0, 1), "--data": pl.choice(*folders)}), metric="loss", goal="minimize"
    )
    sweep = make_sweep(place.runs_dir, spec)
    for number in range(4):
        values = {"--lr": number / 5, "--data": folders[number % 2]}
        add_trial(sweep, number, values, (1.0 / (number + 1),), chosen=values, metric="loss")
    text, anonymous = report.report_text([sweep]), report.report_text([sweep], anonymous=True)
    assert "s3cret" in text
    assert "s3cret" not in anonymous
    for made, axes in ((text, 3), (anonymous, 2)):
        assert "History of loss" in made
        assert "Parallel coordinates" in made
        places = json.loads(re.findall(r'id="places-1">(.*?)</script>', made)[0])
        assert [len(one) for one in places.values()] == [axes] * 4


def test_compare_page_offers_a_report_for_download(place: Place) -> None:
    folder = run_with_values(place)
    client = place.client()
    assert f'href="../compare/report?run={folder.run_id}"' in client.get(f"/runs/{folder.run_id}").text
    answer = client.get(f"/compare/report?run={folder.run_id}&metric=loss&anonymous=1")
    assert "attachment" in answer.headers["content-disposition"]
    assert folder.run_id not in answer.text
    assert [name["name"] for name in data_of(answer.text)["names"]] == ["loss"]


def test_long_curve_in_report_is_thinned_and_keeps_its_peaks(place: Place) -> None:
    folder = place.run()
    log_values(folder, "loss", [100.0 if step == 7777 else step % 10 for step in range(20_000)])
    (curve,) = data_of(report.report_text([folder]))["curves"]
    assert len(curve["x"]) <= 4000
    assert max(curve["y"]) == 100.0
    assert curve["n"] == 20_000


def test_report_is_written_by_the_command_line(cli: Cli) -> None:
    place = Place(Path(cli.folder))
    folder = run_with_values(place)
    cli("trust", str(place.path))
    assert cli("report", folder.run_id, "-o", "out.html", "--metric", "loss").stdout == "out.html\n"
    text = (Path(cli.folder) / "out.html").read_text("utf-8")
    assert [name["name"] for name in data_of(text)["names"]] == ["loss"]
    assert "can't be written" in cli("report", folder.run_id, "-o", "no/such/out.html", code=2).stderr
