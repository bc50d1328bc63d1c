"""More trials and a new sweep from a sweep's page, by the command line's functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.runs import controllers, store
from paceline.runs.folder import RunFolder
from paceline.submit import SourceCopy
from paceline.sweeps import results
from paceline.sweeps.expressions import choice, uniform
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import submit_sweep
from paceline.ui.guard import Token
from tests.helpers import make_job, write_tree
from tests.ui.conftest import Place

SPEC = SweepSpec(space=Space({"lr": choice(0.1, 0.2), "size": uniform(0, 1)}), metric="loss", goal="minimize", trials=3)


@pytest.fixture
def sweep(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A sweep that was submitted, and whose controller does not start."""
    monkeypatch.setattr(controllers, "start", lambda *given: None)
    code = write_tree(tmp_path / "code", {"train.py": "import sys; print(sys.argv)"})
    return submit_sweep(make_job(), SPEC, SourceCopy(directory=code), place.path, "tuned")


def _form(place: Place, **values: str) -> dict[str, str]:
    form = {"space": "lr = 1", "trials": "5", "concurrent": "2", "sampler": "random"}
    return {"form_key": Token(place.path).form_key(), **form, **values}


def test_add_trials_form_raises_the_number_of_trials_of_a_sweep(place: Place, sweep: RunFolder) -> None:
    answer = place.client().post(f"/runs/{sweep.run_id}/more", data=_form(place), follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, f"../{sweep.run_id}/sweep")
    assert results.requested(sweep) == 5


def test_sweep_repeated_by_a_form_has_the_search_space_of_the_form(place: Place, sweep: RunFolder) -> None:
    form = _form(place, space="lr = loguniform(0.001, 1)\nsize = uniform(0, 1)")
    answer = place.client().post(f"/runs/{sweep.run_id}/again", data=form, follow_redirects=False)
    assert answer.status_code == 303, answer.text
    made = RunFolder(place.runs_dir / answer.headers["location"].split("/")[1])
    spec = SweepSpec.from_json(store.stored(made).sweep or {})
    assert spec.space.to_json() == {"lr": ["loguniform", [0.001, 1]], "size": ["uniform", [0, 1]]}
    assert (spec.trials, spec.concurrent) == (5, 2)
    # The search space of the first sweep is unchanged.
    assert SweepSpec.from_json(store.stored(sweep).sweep or {}).space == SPEC.space


@pytest.mark.parametrize(
    ("path", "values", "said"),
    [
        ("more", {"trials": "0"}, "trials=0 is not an integer of 1 or more"),
        ("more", {"trials": "²"}, "trials='²' is not a whole number"),
        ("more", {"trials": "999999"}, "may have"),
        ("again", {"space": ""}, "must be a mapping with a name"),
        ("again", {"space": "lr = unifrom(0, 1)"}, "there is no unifrom()"),
        ("again", {"concurrent": "-1"}, "concurrent='-1' is not a whole number"),
        ("again", {"sampler": "<b>"}, "sampler='<b>'"),
        ("again", {"learn": "1"}, "which learns nothing from results"),
    ],
)
def test_invalid_sweep_form_values_change_nothing(
    place: Place, sweep: RunFolder, path: str, values: dict[str, str], said: str
) -> None:
    answer = place.client().post(f"/runs/{sweep.run_id}/{path}", data=_form(place, **values))
    assert answer.status_code in (400, 409)
    assert said in answer.json()["error"]
    assert results.requested(sweep) == 0
    assert [folder.name for folder in place.runs_dir.iterdir() if folder.name[0] != "."] == [sweep.run_id]


@pytest.mark.parametrize("path", ["more", "again"])
def test_sweep_forms_without_a_csrf_token_or_on_a_read_only_server_are_refused(
    place: Place, sweep: RunFolder, path: str
) -> None:
    address = f"/runs/{sweep.run_id}/{path}"
    assert place.client().post(address, data=_form(place, form_key="x.y")).status_code == 403
    assert place.client(read_only=True).post(address, data=_form(place)).status_code == 403
    assert results.requested(sweep) == 0


def test_adding_trials_to_a_run_that_is_no_sweep_is_refused(place: Place) -> None:
    folder = place.run()
    for path in ("more", "again"):
        answer = place.client().post(f"/runs/{folder.run_id}/{path}", data=_form(place))
        assert "is not a sweep" in answer.json()["error"]
