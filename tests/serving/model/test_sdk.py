"""The SDK's contract of a scoring script, at a real server."""

from __future__ import annotations

import json

import pytest

from tests.helpers import write_tree
from tests.serving.servers import ECHO, refusal, serving


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    script = """
    import json, os
    import numpy as np
    from azureml.contrib.services.aml_response import AMLResponse
    class Broken:
        def to_dict(self):
            raise AttributeError("no attribute 'table'")
    def init():
        global inits, model_dir
        inits = globals().get("inits", 0) + 1
        model_dir = os.environ["AZUREML_MODEL_DIR"]
    def run(data, request_headers):
        value = json.loads(data)
        if value == "what":
            return {"inits": inits, "model": open(os.path.join(model_dir, "m.txt")).read(), "cwd": os.getcwd()}
        if value == "raise":
            raise RuntimeError("a secret of the script")
        if value == "nan":
            return {"a": [1.0, float("nan")]}
        if value == "array":
            return {"x": np.arange(3.0), "n": np.int64(2), "s": "text"}
        if value == "broken":
            return {"a": [Broken()]}
        if isinstance(value, dict) and "status" in value:
            return AMLResponse("x", value["status"], value.get("headers"))
        if value == "text":
            return json.dumps([1])
        if value == "header":
            return request_headers["X-Mine"]
        return {"got": value}
    """
    folder = tmp_path_factory.mktemp("echo")
    (folder / "model").mkdir()
    (folder / "model" / "m.txt").write_text("the model")
    model = {"name": "digits", "version": "3", "path": "model"}
    with serving(folder, script, models=[model]) as server:
        yield server


@pytest.mark.promise("sdk-s-contract-holds-init")
def test_init_runs_once_and_finds_the_model(echo):
    answers = [echo.score(json.dumps("what")).json() for _ in range(3)]
    assert answers[0] == {"inits": 1, "model": "the model", "cwd": str(echo.folder / "src")}
    assert answers == [answers[0]] * 3


@pytest.mark.promise("sdk-s-contract-holds-init")
def test_body_is_passed_as_text_for_each_content_type(echo):
    answer = echo.score('{"a": "ä"}', headers={"content-type": "text/plain"})
    assert (answer.status_code, answer.json()) == (200, {"got": {"a": "ä"}})
    assert answer.headers["content-type"] == "application/json"
    assert float(answer.headers["x-ms-run-fn-exec-ms"]) > 0


def test_body_that_is_not_utf8_returns_400(echo):
    answer = echo.score(b"\xff")
    assert answer.status_code == 400
    assert "decoded as UTF-8" in answer.json()["message"]


@pytest.mark.promise("sdk-s-contract-holds-init")
def test_query_string_is_passed_as_json(echo):
    answer = echo.client.get("/score?a=1&b=[1,2]&c=a&d=null&a2=x&a2=2")
    assert answer.json() == {"got": {"a": 1, "b": [1, 2], "c": "a", "d": None, "a2": ["x", 2]}}


def test_numpy_values_are_encoded_as_json(echo):
    assert echo.score(json.dumps("array")).json() == {"x": [0.0, 1.0, 2.0], "n": 2, "s": "text"}
    # As in Azure's server, a returned string becomes a JSON string.
    assert echo.score(json.dumps("text")).json() == "[1]"


@pytest.mark.promise("sdk-s-contract-holds-init")
def test_exception_text_is_in_the_log_only(echo):
    answer = echo.score(json.dumps("raise"))
    assert answer.status_code == 500
    assert answer.json() == {"message": "An unexpected error occurred in scoring script. Check the logs for more info."}
    assert answer.headers["x-ms-run-function-failed"] == "True"
    assert "RuntimeError: a secret of the script" in echo.log


def test_nan_in_a_result_returns_500_and_the_message_names_its_key_and_index(echo):
    answer = echo.score(json.dumps("nan"))
    assert (answer.status_code, answer.json()) == (500, {"message": "the result['a'][1] is nan, which JSON has not."})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("broken", "the result['a'][0]: no attribute 'table'."),
        ({"status": 99}, "the result has the HTTP status 99. Write 200 to 599."),
        ({"status": 99999999}, "the result has the HTTP status 99999999."),
        ({"status": 200, "headers": {"x-name": "\u20ac"}}, "the result has the header 'x-name': '\u20ac'."),
        ({"status": 200, "headers": {"x-name": "a\r\nx-other: b"}}, "An unexpected error"),
    ],
    ids=range(5),
)
def test_result_that_can_not_be_sent_returns_500_and_the_process_lives(echo, asked, said):
    answer = echo.score(json.dumps(asked))
    assert (answer.status_code, said in answer.json()["message"]) == (500, True), answer.text
    assert "ended" not in echo.log


@pytest.mark.promise("sdk-s-contract-holds-init")
def test_request_headers_are_readable_in_the_run_function_and_request_ids_are_returned(echo):
    answer = echo.score(json.dumps("header"), headers={"x-mine": "5", "x-request-id": "abc"})
    assert answer.json() == "5"
    assert (answer.headers["x-request-id"], answer.headers["x-ms-request-id"]) == ("abc", "abc")
    assert "x-ms-client-request-id" not in answer.headers
    answer = echo.score("1", headers={"x-ms-client-request-id": "mine"})
    assert (answer.headers["x-ms-client-request-id"], answer.headers["x-ms-request-id"]) == ("mine", "mine")
    assert len({echo.score("1").headers["x-request-id"] for _ in range(5)}) == 5
    assert echo.score("1", headers={"x-request-id": "a" * 101}).status_code == 431


def test_scoring_server_answers_each_http_method_and_path_as_azure_services_do(echo):
    assert echo.client.get("/").text == "Healthy"
    assert echo.client.options("/score").status_code == 200
    assert echo.client.put("/score").status_code == 405
    assert (echo.client.get("/none").status_code, echo.client.get("/none").json()) == (
        404,
        {"message": "there is nothing here."},
    )
    assert echo.client.get("/swagger.json").json()["swagger"] == "2.0"
    assert echo.client.get("/swagger.json?version=3").json()["openapi"].startswith("3.")
    assert echo.client.get("/swagger.json?version=4").status_code == 404


@pytest.mark.promise("decorators-inference-schema-rawhttp-kept")
def test_scoring_function_with_inference_schema_decorators_gets_values_by_parameter_name(tmp_path):
    pytest.importorskip("inference_schema", reason="needs inference-schema")
    script = """
    import numpy as np
    from inference_schema.schema_decorators import input_schema, output_schema
    from inference_schema.parameter_types.numpy_parameter_type import NumpyParameterType
    from inference_schema.parameter_types.standard_py_parameter_type import StandardPythonParameterType

    def init():
        pass

    @input_schema("data", NumpyParameterType(np.array([[1.0, 2.0]])))
    @input_schema("factor", StandardPythonParameterType(1.0))
    @output_schema(StandardPythonParameterType([1.0]))
    def run(data, factor=2.0):
        if factor == 0:
            raise ValueError("mine")
        return (data.sum(axis=1) * factor).tolist()
    """
    with serving(tmp_path, script) as server:
        assert server.score({"data": [[1.0, 2.0]], "factor": 3.0}).json() == [9.0]
        assert server.score({"data": [[1.0, 2.0]]}).json() == [6.0]
        for body, status, said in (
            ('{"factor": 1.0}', 400, "A value is not provided for the 'data' parameter."),
            ("[1]", 400, "POST body should be a JSON dictionary."),
            ("{", 400, "POST body could not be decoded as JSON"),
            ("", 400, "POST body is empty. Expecting a JSON dictionary."),
            # If the decorators can't read the body, the client gets 400 and run() is not called.
            ('{"data": [["a", 2]]}', 400, "could not convert string to float: 'a'"),
            ('{"data": [[1, 2, 3]]}', 400, "array has size 3 on dimension #1, while expected value is 2"),
            ('{"data": 1}', 400, "expected an array of items"),
            ('{"data": [[1, 2]], "factor": 0.0}', 500, "unexpected error occurred in scoring script"),
        ):
            answer = server.score(body, headers={"content-type": "application/json; charset=utf-8"})
            assert (answer.status_code, said in answer.json()["message"]) == (status, True), answer.text
        answer = server.score('{"data": [[1]]}', headers={"content-type": "text/plain"})
        assert (answer.status_code, answer.json()) == (415, {"message": "Expects Content-Type to be application/json"})
        given = server.client.get("/swagger.json").json()["definitions"]["ServiceInput"]
        assert set(given["properties"]) == {"data", "factor"}


@pytest.mark.promise("decorators-inference-schema-rawhttp-kept")
def test_function_decorated_with_rawhttp_receives_the_http_request_and_may_return_a_response(tmp_path):
    script = """
    from azureml.contrib.services.aml_request import AMLRequest, rawhttp
    from azureml.contrib.services.aml_response import AMLResponse

    def init():
        pass

    @rawhttp
    def run(request):
        assert isinstance(request, AMLRequest)
        if request.method == "GET":
            return AMLResponse({"a": request.args.get("a"), "all": request.args.getlist("a")}, 200, json_str=True)
        if request.get_data(False) == b"teapot":
            return AMLResponse("short and stout", 418, {"x-tea": "green, black"})
        if request.data == b"fail":
            return AMLResponse("no", 503)
        return [request.method, request.path, request.headers["X-Mine"], len(request.data), request.mimetype]
    """
    with serving(tmp_path, script) as server:
        answer = server.score(b"\xff\x00", headers={"x-mine": "5", "content-type": "image/png"})
        assert answer.json() == ["POST", "/score", "5", 2, "image/png"]
        assert server.client.get("/score?a=1&a=2").json() == {"a": "1", "all": ["1", "2"]}
        answer = server.score("teapot")
        assert (answer.status_code, answer.text, answer.headers["x-tea"]) == (418, "short and stout", "green, black")
        assert answer.headers["x-ms-run-function-failed"] == "False"
        assert server.score("fail").headers["x-ms-run-function-failed"] == "True"
        assert server.score("1").status_code == 500  # the request has no header X-Mine, which run() reads


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("def run(data): pass", "there is run() and no init()"),
        ("def init(): pass", "neither run(data)"),
        ("def init(): pass\ndef run(): pass", "run() has no parameter"),
        ("def init(): pass\ndef run(*data): pass", "run() takes *data"),
        ("def init(): raise OSError('no such model')\ndef run(data): pass", "OSError: no such model ("),
        ("import nosuchmodule", "ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("def init(:", "SyntaxError"),
        ("import os\nos._exit(3)", "ended while it was loading (it ended with exit code 3)"),
    ],
    ids=["no init", "no run", "no data", "stars", "init fails", "import fails", "no python", "exits"],
)
def test_unservable_script_ends_the_server_with_one_error_line(tmp_path, script, said):
    assert said in refusal(tmp_path, script)


def test_entry_script_that_is_not_a_python_file_is_refused(tmp_path):
    write_tree(tmp_path, {"src/score": ECHO})
    assert "is not a Python file. Name a .py file." in refusal(tmp_path, entry_script="score", source_dir="src")


def test_missing_entry_script_is_named_in_the_error(tmp_path):
    (tmp_path / "src").mkdir()
    assert "entry_script='x.py': there is no such file in" in refusal(tmp_path, entry_script="x.py", source_dir="src")


def test_sigterm_ends_the_server_and_leaves_nothing(tmp_path):
    with serving(tmp_path, ECHO) as server:
        assert server.score([1]).json() == {"got": [1]}
        pids = [each["pid"] for each in server.state["workers"]]
        assert server.end() == 0
    assert server.state["state"] == "stopped"
    from paceline.system.processes import is_alive

    assert [is_alive(pid) for pid in pids] == [False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "log", "server.json", "src"]


LAYOUT = """
import json, os
def init():
    # The SDK's way, by its variables, and that of scripts that were written for files beside them.
    top = os.environ["AML_APP_ROOT"]
    for path in ("./scoring/data/x.json", "data/x.json", f"{top}/{os.environ['AZUREML_SOURCE_DIRECTORY']}/data/x.json"):
        with open(path) as file:
            assert json.load(file) == 1, path
    assert os.path.samefile(os.path.join(top, os.environ["AZUREML_ENTRY_SCRIPT"]), __file__)
    assert os.path.basename(os.path.dirname(__file__)) == "scoring"
    # A folder of that name in the source itself does not hide the source.
    assert not os.path.exists("scoring/inner.txt") and os.path.exists("scoring/scoring/inner.txt")
    import data.y
    from scoring.other import z
def run(data):
    return sorted(os.listdir("."))
"""
LAID_OUT = {"data/x.json": "1", "data/y.py": "", "other/z.py": "", "scoring/inner.txt": ""}


def test_scoring_script_opens_its_files_with_or_without_the_source_folder_in_the_path(tmp_path):
    """In the SDK a service works in the folder above its source, and scripts open `./<source folder>/file`."""
    write_tree(tmp_path / "src", LAID_OUT)
    with serving(tmp_path, LAYOUT, environment={"AZUREML_SOURCE_DIRECTORY": "scoring"}) as server:
        found = server.score(None).json()
    assert [name for name in found if name != "__pycache__"] == ["data", "other", "score.py", "scoring"]


@pytest.mark.parametrize("name", ["..", "a/b"])
def test_invalid_source_directory_variable_is_ignored(tmp_path, name):
    script = "import os\ndef init(): pass\ndef run(data): return os.path.basename(os.getcwd())\n"
    with serving(tmp_path, script, environment={"AZUREML_SOURCE_DIRECTORY": name}) as server:
        assert server.score(None).json() == "src"
