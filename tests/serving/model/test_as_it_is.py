"""Models without an entry script, each at a real server."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest

from paceline.serving.model.answers import InputError
from paceline.serving.model.runners.base import TensorInfo
from paceline.serving.model.tensors import from_lists
from tests.late import late
from tests.serving.servers import refusal, serving

np = late("numpy")
torch = late("torch")

MODEL = {"name": "digits", "version": "3", "path": "model"}


def tensor(data, shape, datatype="FP32", name="x"):
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A classifier of texts over two numbers, kept by joblib."""
    import joblib
    from sklearn.linear_model import LogisticRegression

    folder = tmp_path_factory.mktemp("sklearn")
    (folder / "model").mkdir()
    made = LogisticRegression().fit([[0.0, 0.0], [1.0, 1.0]], ["no", "yes"])
    joblib.dump(made, folder / "model" / "model.joblib")
    with serving(folder, models=[MODEL], max_batch=8) as server:
        yield server


def test_served_classifier_returns_a_result_per_row_keyed_by_the_name_of_the_called_method(classifier):
    assert classifier.score({"data": [[0, 0], [1, 1]]}).json() == {"predict": ["no", "yes"]}
    assert classifier.score([[1, 1]]).json() == {"predict": ["yes"]}
    found = classifier.score({"data": [[1, 1]], "method": "predict_proba"}).json()
    assert list(found) == ["predict_proba"]
    assert sum(found["predict_proba"][0]) == pytest.approx(1)
    assert list(classifier.score({"data": [[1, 1]], "outputs": ["predict", "decision_function"]}).json()) == [
        "predict",
        "decision_function",
    ]


@pytest.mark.promise("pickle-loaded-said")
def test_serving_a_pickle_model_logs_a_warning(classifier):
    assert "runs what is in it, for it is a pickle" in classifier.log


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[[1, 2, 3]]", "should be of shape [-1, 2], not [1, 3]."),
        ("[1, 2]", "should be of shape [-1, 2], not [2]."),
        ("[[1], [1, 2]]", "its lists differ in length."),
        ('[["a", "b"]]', "should hold numbers alone"),
        ("[[NaN, 1]]", "NaN is not a number of JSON"),
        ("[[1e999, 1]]", "none of them too large"),
        ("3", "should be a list of rows"),
        ("{}", 'the body should be {"data"'),
        ('{"data": [[1, 1]], "method": "fit"}', "the model has no output 'fit'. It has predict, predict_proba"),
        ('[{"a": 1}]', "fitted without names"),
    ],
    ids=range(10),
)
def test_invalid_model_input_returns_400(classifier, body, said):
    answer = classifier.score(body)
    assert (answer.status_code, said in answer.json()["message"]) == (400, True), answer.text


@pytest.mark.promise("scikit-learn-onnx-torchscript-torch")
def test_inference_protocol_v2_endpoints_return_health_metadata_and_predictions(classifier):
    get = classifier.client.get
    assert get("/v2/health/live").json() == {"live": True}
    assert get("/v2/health/ready").json() == {"ready": True}
    assert get("/v2").json()["name"] == "paceline"
    metadata = get("/v2/models/digits").json()
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("digits", ["3"], "sklearn")
    assert metadata["inputs"] == [{"name": "input", "datatype": "FP64", "shape": [-1, 2]}]
    assert get("/v2/models/digits/versions/3/ready").json() == {"ready": True}
    for path in ("/v2/models/none", "/v2/models/digits/versions/4", "/v2/models/..%2f..%2fetc/ready"):
        assert get(path).status_code == 404
    request = {
        "id": "a",
        "inputs": [tensor([0, 0, 1, 1], [2, 2])],
        "outputs": [{"name": "predict"}, {"name": "predict_proba"}],
    }
    for path in ("/v2/models/digits/infer", "/v2/models/digits/versions/3/infer"):
        found = classifier.client.post(path, json=request).json()
        assert (found["model_name"], found["model_version"], found["id"]) == ("digits", "3", "a")
        predicted, likely = found["outputs"]
        assert predicted == {"name": "predict", "shape": [2], "datatype": "BYTES", "data": ["no", "yes"]}
        assert (likely["shape"], likely["datatype"], len(likely["data"])) == ([2, 2], "FP64", 4)
    # The metadata describes the real outputs.
    told = {each["name"]: (each["datatype"], each["shape"]) for each in metadata["outputs"]}
    assert told == {"predict": ("BYTES", [-1]), "predict_proba": ("FP64", [-1, 2]), "decision_function": ("FP64", [-1])}
    # All errors have the format of the protocol, whether the front process or a model process reports them.
    for method, path, status, said in (
        ("POST", "/v2/models/none/infer", 404, "there is no model at '/v2/models/none/infer'."),
        ("GET", "/v2/models/none", 404, "there is no model at '/v2/models/none'."),
        ("GET", "/v2/models/digits/infer", 405, "GET is not answered here."),
    ):
        answer = classifier.client.request(method, path)
        assert (answer.status_code, answer.json()["error"]) == (status, said)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (None, 'the body should be {"inputs"'),
        ([], "the input 'input' is missing."),
        ([tensor([1, 2], [1, 3])], "shape [1, 3] has 3 values, and data has 2."),
        ([tensor([1, 2], [10**9, 10**9])], "and data has 2."),
        ([tensor([1, 2], [-1, 2])], "shape should be a list of sizes."),
        ([tensor([1, 2], [1, 2], "FP8")], "datatype 'FP8' is not one of BOOL"),
        ([tensor(["a", "b"], [1, 2])], "data should hold numbers alone"),
        ([tensor([1.5, 2], [1, 2], "INT8")], "data has values that INT8 does not hold."),
        ([tensor([1e39, 2], [1, 2])], "data has values that FP32 does not hold."),
        ([tensor("AAAA", [1, 2])], "Tensors in binary are not taken."),
        ([tensor([1, 2], [1, 2], {})], "datatype '{}' is not one of BOOL"),
        ([tensor([1], [1] * 99)], "maximum supported dimension"),
        ([tensor([1, 2], [1, 2]), tensor([1, 2], [1, 2])], "should be a text of its own"),
        ([tensor([1, 2], [1, 2]), tensor([1, 2], [1, 2], name="y")], "the model has no input 'x'"),
    ],
    ids=range(14),
)
def test_inference_request_with_invalid_tensors_returns_400_with_the_reason(classifier, inputs, said):
    answer = classifier.client.post("/v2/models/digits/infer", json={"inputs": inputs})
    assert (answer.status_code, said in answer.json()["error"]) == (400, True), answer.text


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        *(("INT64", [1.9]), ("INT8", [300]), ("FP32", [1e300]), ("BOOL", [0.5]), ("INT64", [-1, 2**63])),
        *(("BYTES", ["a", 1]), ("BYTES", [["a"], [None]]), ("INT64", [2**64])),
    ],
)
def test_values_that_a_datatype_does_not_hold_are_refused(datatype, value):
    with pytest.raises(InputError, match="the input 'x'"):
        from_lists(value, TensorInfo("x", datatype, None))


def test_waiting_requests_are_batched_into_one_model_call(tmp_path):
    """During one call of the model other requests come; each gets its own rows, and a wrong one spoils no other answer."""
    from concurrent.futures import ThreadPoolExecutor

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "slow.py").write_text(
        "import time\nimport numpy as np\n"
        "class Slow:\n"
        "    n_features_in_ = 1\n"
        "    sizes = []\n"
        "    def predict(self, rows):\n"
        "        time.sleep(0.2)\n"
        "        self.sizes.append(len(rows))\n"
        "        if (rows < 0).any(): raise ValueError('below 0')\n"
        "        return rows[:, 0] * 2\n"
        "    def transform(self, rows):\n"
        "        return np.array(self.sizes)\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m.pkl").write_bytes(b"cslow\nSlow\n)\x81.")
    with serving(tmp_path, models=[MODEL], max_batch=4, environment={"PYTHONPATH": str(tmp_path / "src")}) as server:
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda at: server.score([[float(at)]] if at else [[-1.0]]), range(12)))
        assert [answer.status_code for answer in answers] == [400] + [200] * 11
        assert [answer.json() for answer in answers[1:]] == [{"predict": [at * 2.0]} for at in range(1, 12)]
        sizes = server.score({"data": [[1.0]], "method": "transform"}).json()["transform"]
        assert max(sizes) > 1
        assert max(sizes) <= 4


def test_text_model_takes_one_text_per_row(tmp_path):
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    made = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(["a cold day", "a warm day"] * 3, [0, 1] * 3)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.pkl").write_bytes(pickle.dumps(made))
    with serving(tmp_path, models=[MODEL]) as server:
        assert server.score({"data": ["warm", "cold"]}).json() == {"predict": [1, 0]}
        for body in ('{"data": [1, 2]}', '{"data": [["warm"]]}', '{"data": [null]}'):
            answer = server.score(body)
            assert (answer.status_code, "the input 'input' should" in answer.json()["message"]) == (400, True)
        metadata = server.client.get("/v2/models/digits").json()
        assert metadata["inputs"] == [{"name": "input", "datatype": "BYTES", "shape": [-1]}]
        assert metadata["outputs"][0] == {"name": "predict", "datatype": "INT64", "shape": [-1]}
        infer = server.client.post("/v2/models/digits/infer", json={"inputs": [tensor(["warm"], [1], "BYTES")]})
        assert infer.json()["outputs"][0]["data"] == [1]


def test_model_trained_on_a_data_frame_gets_columns_by_name(tmp_path):
    import joblib
    import pandas as pd
    from sklearn.linear_model import LinearRegression

    (tmp_path / "model").mkdir()
    made = LinearRegression().fit(pd.DataFrame({"a": [0.0, 1.0, 1.0], "b": [0.0, 0.0, 1.0]}), [0.0, 1.0, 3.0])
    joblib.dump(made, tmp_path / "model" / "m.joblib")
    with serving(tmp_path, models=[MODEL]) as server:
        assert server.score([{"b": 1.0, "a": 1.0}]).json()["predict"] == pytest.approx([3.0])
        assert server.score([[1.0, 1.0]]).json()["predict"] == pytest.approx([3.0])
        assert "feature names" not in server.log
        assert server.score([{"a": 1}]).json()["message"] == "data[0] lacks 'b'."
        assert "which is not one of a, b" in server.score([{"a": 1, "b": 1, "c": 1}]).json()["message"]


@pytest.mark.promise("scikit-learn-onnx-torchscript-torch")
@pytest.mark.parametrize(
    ("name", "platform", "workers"),
    [
        ("m.pt", "pytorch_torchscript", 2),
        # Use a single process here: each process loads torch, and both formats share their weights in the same way.
        ("m.pt2", "pytorch_export", 1),
        pytest.param("m.pt2", "pytorch_export", 2, marks=pytest.mark.proof),
    ],
)
def test_torchscript_and_exported_programs_are_served(tmp_path, name, platform, workers):
    class Two(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self):
            super().__init__()
            # The weights need more than a memory page or two, so that the processes share them.
            self.linear = torch.nn.Linear(2, 200_000)

        def forward(self, x):
            return self.linear(x)[:, :2]

    torch.manual_seed(0)
    model = Two().eval()
    wanted = model(torch.tensor([[1.0, 2.0]])).tolist()
    (tmp_path / "model").mkdir()
    if name == "m.pt":
        with warnings.catch_warnings():
            # torch 2.10 and later deprecate TorchScript.
            warnings.simplefilter("ignore", DeprecationWarning)
            # Skip the check of `trace`: it would run the model again, and load a module for a second.
            traced = torch.jit.trace(model, torch.zeros(1, 2), check_trace=False)
            torch.jit.save(traced, tmp_path / "model" / name)
    else:
        rows = torch.export.Dim("rows", min=1, max=64)
        torch.export.save(
            torch.export.export(model, (torch.zeros(3, 2),), dynamic_shapes=({0: rows},)), tmp_path / "model" / name
        )
    with serving(tmp_path, models=[MODEL], workers=workers) as server:
        server.wait(lambda state: [each["state"] for each in state["workers"]] == ["ready"] * workers)
        assert server.client.get("/v2/models/digits").json()["platform"] == platform
        for _ in range(4):
            assert server.score({"data": [[1, 2]]}).json()["output"][0] == pytest.approx(wanted[0], rel=1e-4)
        found = server.client.post("/v2/models/digits/infer", json={"inputs": [tensor([1, 2], [1, 2])]}).json()
        assert found["outputs"][0]["data"] == pytest.approx(wanted[0], rel=1e-4)
        assert server.score([[1, 2, 3]]).status_code == 400
        # Several processes map the shared file. A single process does not use it.
        for each in server.state["workers"]:
            assert (str(tmp_path / "shared") in Path(f"/proc/{each['pid']}/maps").read_text()) == (workers > 1)
    assert not (tmp_path / "shared").exists()


@pytest.mark.promise("scikit-learn-onnx-torchscript-torch")
def test_onnx_model_is_served(tmp_path):
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    from onnx import TensorProto, helper

    (tmp_path / "model").mkdir()
    rows = helper.make_tensor_value_info("rows", TensorProto.FLOAT, [None, 2])
    out = helper.make_tensor_value_info("double", TensorProto.FLOAT, [None, 2])
    graph = helper.make_graph([helper.make_node("Add", ["rows", "rows"], ["double"])], "g", [rows], [out])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, str(tmp_path / "model" / "m.onnx"))
    with serving(tmp_path, models=[MODEL]) as server:
        assert server.score({"data": [[1, 2]]}).json() == {"double": [[2.0, 4.0]]}
        assert server.score({"rows": [[1, 2]]}).json() == {"double": [[2.0, 4.0]]}
        assert server.score([[1]]).status_code == 400
        metadata = server.client.get("/v2/models/digits").json()
        assert metadata["inputs"] == [{"name": "rows", "datatype": "FP32", "shape": [-1, 2]}]


@pytest.mark.parametrize(
    ("files", "options", "said"),
    [
        ({}, {}, "no file of a kind that is served without an entry script"),
        (
            {"a.onnx": b"", "b/c.joblib": b""},
            {},
            "2 files of a kind that is served without an entry script: a.onnx, b/c.joblib",
        ),
        ({"a.pt": b"x"}, {}, "a.pt is not TorchScript"),
        ({"a.onnx": b""}, {"framework": "caffe"}, "framework='caffe' can't be served without an entry script"),
        ({"a.pkl": pickle.dumps({"a": 1})}, {}, "holds a dict, which has no method of predict"),
        ({"a.joblib": b"no pickle"}, {}, "a.joblib can't be loaded: "),
    ],
    ids=["none", "two", "weights", "framework", "dict", "broken"],
)
def test_unservable_model_file_is_reported(tmp_path, files, options, said):
    for name, data in files.items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "model").mkdir(exist_ok=True)
    assert said in refusal(tmp_path, models=[{**MODEL, **options}])
