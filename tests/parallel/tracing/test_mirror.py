"""A copy of a model that follows changes of the model."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from tests.late import late

torch, nn = late("torch"), late("torch.nn")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global AttributeMirror, Fingerprint, attributes_kept
    from paceline.parallel.tracing.fake_model import AttributeMirror, attributes_kept
    from paceline.parallel.tracing.fingerprint import Fingerprint


def test_new_tensor_at_a_reused_address_is_recognized():
    model, copied = nn.Identity(), nn.Identity()
    model.mask, copied.mask = torch.tensor(-1.0), torch.tensor(-1.0)
    mirror = AttributeMirror(model, copied, by_version=True)
    for step in range(20):
        # The first assignment frees the tensor that the mirror has seen. So the tensor of the second assignment may get
        # its address.
        for value in (float(step), step + 0.5):
            model.mask = torch.tensor(value)
        mirror.follow(torch.clone)
        assert float(copied.mask) == step + 0.5


def test_fingerprints_of_short_lived_tensors_are_distinct():
    taken = [Fingerprint().of(torch.ones(2)) for _ in range(20)]
    assert len(set(taken)) == 20


class _Cache(OrderedDict[str, int]):
    """A dict whose `copy` is empty, because its class takes another argument than items."""

    def __init__(self, size: object = 8) -> None:
        super().__init__()
        self.size = size


def test_attributes_kept_restores_a_changed_list_but_not_a_changed_instance_of_a_dict_subclass():
    model = nn.Identity()
    model.cache, model.rows = _Cache(), [1]
    model.cache["a"] = 1
    with attributes_kept(model):
        model.cache["b"] = 2
        model.rows.append(2)
    assert dict(model.cache) == {"a": 1, "b": 2}
    assert model.rows == [1]
