from __future__ import annotations

import pytest

from paceline import checkpoint
from paceline.errors import CheckpointError, UserError
from tests.late import late

torch = late("torch")


@pytest.mark.promise("save-latest-let-script-go")
def test_model_and_optimizer_resume_from_a_checkpoint(tmp_path):
    def training(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 1).double()
        return {
            "model": model,
            "optimizer": torch.optim.Adam(model.parameters()),
            "epoch": seed,
            "mean": torch.zeros(2),
        }

    def step(state, number):
        torch.manual_seed(100 + number)
        state["optimizer"].zero_grad()
        loss = state["model"](torch.randn(4, 3).double()).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["mean"] += number
        return loss.item()

    plain = training(1)
    losses = [step(plain, number) for number in range(6)]
    first = training(1)
    for number in range(3):
        step(first, number)
        checkpoint.save(first, number + 1, folder=tmp_path)
    # The stored state is the state at the time of the save, even if the training continues meanwhile.
    step(first, 3)
    second = training(2)
    found = checkpoint.latest(tmp_path)
    found.load_into(second)
    assert (found.step, second["epoch"]) == (3, 1)
    assert [step(second, number) for number in range(3, 6)] == losses[3:]
    assert torch.equal(second["mean"], plain["mean"])
    # The checkpoint is a file in the safetensors format, which other programs can read.
    from safetensors.torch import load_file

    assert set(load_file(found.paths[0])) >= {"model.weight", "model.bias", "mean"}


def test_checkpoint_latest_returns_none_for_a_missing_folder(tmp_path):
    assert checkpoint.latest(tmp_path / "missing") is None


def test_load_into_refuses_objects_that_do_not_match_the_state_and_changes_none(tmp_path):
    checkpoint.save({"a": 1}, 1, folder=tmp_path)
    found = checkpoint.latest(tmp_path)
    objects = {"a": 5, "b": 6}
    with pytest.raises(UserError, match="no 'b'; it has 'a'"):
        found.load_into(objects)
    assert objects == {"a": 5, "b": 6}
    with pytest.raises(UserError, match="a int can't take the state"):
        found.load_into(3)


def test_load_into_refuses_a_tensor_of_another_shape_before_changing_any_tensor(tmp_path):
    checkpoint.save({"first": torch.ones(2), "second": torch.ones(1)}, 1, folder=tmp_path)
    objects = {"first": torch.zeros(2), "second": torch.zeros(3)}
    with pytest.raises(UserError, match=r"'second' is a tensor of shape \[3\], and .* has one of shape \[1\] there"):
        checkpoint.latest(tmp_path).load_into(objects)
    assert objects["first"].sum() == 0


def test_url_as_checkpoint_folder_is_refused():
    with pytest.raises(UserError, match="is an address"):
        checkpoint.latest("s3://bucket/checkpoints")


def test_each_rank_loads_its_own_part_but_loading_at_another_world_size_raises_checkpoint_error(tmp_path, monkeypatch):
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert checkpoint.latest(tmp_path) is None
        checkpoint.save({"rank": rank}, 4, parts=True, asynchronous=False, folder=tmp_path)
    assert checkpoint.latest(tmp_path).state == {"rank": 1}
    monkeypatch.setenv("WORLD_SIZE", "3")
    found = checkpoint.latest(tmp_path)
    with pytest.raises(CheckpointError, match="each of 2 ranks, and there are 3 now"):
        found.state  # noqa: B018
    assert list(found.parts) == [{"rank": 0}, {"rank": 1}]


@pytest.mark.promise("checkpoint-runs-code-whoever-written")
def test_pickle_named_like_a_checkpoint_is_refused_without_running_it(tmp_path):
    import pickle

    class Evil:
        def __reduce__(self):
            return print, ("run",)

    (tmp_path / "checkpoint_9.safetensors").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="checkpoint_9"):
        checkpoint.latest(tmp_path).state  # noqa: B018
