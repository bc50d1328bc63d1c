"""A copy of a model that follows what is set on the model."""

from __future__ import annotations

import pytest

from tests.late import late

torch, nn = late("torch"), late("torch.nn")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """What loads torch is imported before the first test: collecting the tests loads none."""
    global AttributeMirror, Fingerprint
    from paceline.parallel.tracing.fake_model import AttributeMirror
    from paceline.parallel.tracing.fingerprint import Fingerprint


def test_a_tensor_at_the_place_in_memory_of_one_that_is_gone_is_another_one():
    model, copied = nn.Identity(), nn.Identity()
    model.mask, copied.mask = torch.tensor(-1.0), torch.tensor(-1.0)
    mirror = AttributeMirror(model, copied, by_version=True)
    for step in range(20):
        # In between, the tensor whose fingerprint was taken goes, and the next but one comes to lie where it lay.
        for value in (float(step), step + 0.5):
            model.mask = torch.tensor(value)
        mirror.follow(torch.clone)
        assert float(copied.mask) == step + 0.5


def test_a_fingerprint_holds_what_it_knows_by_identity():
    taken = [Fingerprint().of(torch.ones(2)) for _ in range(20)]
    assert len(set(taken)) == 20
