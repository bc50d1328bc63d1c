from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from paceline.compat.azureml.core.environment import Environment
from paceline.compat.azureml.core.image import ContainerImage, Image
from paceline.compat.azureml.core.model import InferenceConfig, Model
from paceline.compat.azureml.core.webservice import (
    AciWebservice,
    AksEndpoint,
    AksWebservice,
    LocalWebservice,
    Webservice,
)
from paceline.compat.azureml.exceptions import WebserviceException

SCORE = """
import json, os
from azureml.core.model import Model

def init():
    global factor
    with open(Model.get_model_path("times")) as file:
        factor = json.load(file)["factor"]
    assert os.path.exists(os.path.join(os.environ["AZUREML_MODEL_DIR"], "m.json"))

def run(raw):
    return json.dumps([value * factor for value in json.loads(raw)["data"]])
"""


@pytest.fixture
def config(ws):
    Path("m.json").write_text('{"factor": 3}')
    Path("score.py").write_text(SCORE)
    return InferenceConfig(entry_script="score.py", environment=Environment("e"))


def test_webservice_is_deployed_called_updated_and_deleted(ws, config):
    model = Model.register(ws, "m.json", "times")
    service = Model.deploy(ws, "local-svc", [model], config, LocalWebservice.deploy_configuration(), overwrite=True)
    try:
        service.wait_for_deployment(show_output=True)
        assert (service.state, service.compute_type) == ("running", "Local")
        assert service.scoring_uri.endswith(f":{service.port}/score")
        # run() always returns JSON, so a text is returned as a text.
        assert json.loads(service.run(json.dumps({"data": [1, 2]}))) == [3, 6]
        with pytest.raises(WebserviceException) as refused:
            service.run("{}")
        assert refused.value.status_code in (500, 502)
        assert "KeyError" in service.get_logs()
        Path("m.json").write_text('{"factor": 5}')
        service.update(models=[Model.register(ws, "m.json", "times")])
        service.wait_for_deployment()
        assert json.loads(LocalWebservice(ws, "local-svc").run('{"data": [1]}')) == [5]
        assert [*ws.webservices] == ["local-svc"]
        with pytest.raises(NotImplementedError):
            service.get_keys()
        with pytest.raises(WebserviceException, match="local-svc"):
            Model.deploy(ws, "local-svc", [model], config, LocalWebservice.deploy_configuration())
    finally:
        service.delete()
    with pytest.raises(WebserviceException, match="WebserviceNotFound"):
        Webservice(ws, "local-svc")


@pytest.mark.parametrize("source", ["./source_dir", "."])
def test_scoring_script_opens_files_relative_to_its_source_folder_or_the_parent_of_that_folder(
    ws, config, monkeypatch, source
):
    """Scripts open `./source_dir/file`, as Microsoft's notebooks have it; those for Paceline's services open `./file`."""
    folder = Path("source_dir/deep")
    folder.mkdir(parents=True)
    (folder.parent / "more.json").write_text("4")
    (folder / "score.py").write_text(
        "import json\ndef init(): pass\n"
        "def run(raw): return [json.load(open(path)) for path in ('./source_dir/more.json', 'more.json')]\n"
    )
    model = Model.register(ws, "m.json", "times")
    if source == ".":
        monkeypatch.chdir("source_dir")
    config = InferenceConfig("deep/score.py", source_directory=source, environment=Environment("e"))
    service = Model.deploy(ws, "svc", [model], config, LocalWebservice.deploy_configuration())
    try:
        service.wait_for_deployment()
        assert service.run("") == [4, 4]
        service.update(models=[Model.register(ws, "deep/score.py" if source == "." else "m.json", "times")])
        service.wait_for_deployment()
        assert service.run("") == [4, 4]
    finally:
        service.delete()
    made = Model.package(ws, [model], config, generate_dockerfile=True)
    made.save("away")
    assert json.loads(Path("away/service.json").read_text())["environment"]["AZUREML_SOURCE_DIRECTORY"] == "source_dir"


def test_webservice_deployed_from_a_container_image_with_auth_enabled_accepts_its_key(ws, config):
    config = ContainerImage.image_configuration(execution_script="score.py", runtime="python", conda_file=None)
    model = Model.register(ws, "m.json", "times")
    image = ContainerImage.create(name="img", models=[model], image_config=config, workspace=ws)
    image.wait_for_creation(show_output=True)
    assert (image.version, image.creation_state, ws.images()["img"].id) == (1, "Succeeded", "img:1")
    aci = AciWebservice.deploy_configuration(cpu_cores=1, memory_gb=1, auth_enabled=True, tags={"a": "b"})
    service = Webservice.deploy_from_image(workspace=ws, name="aci-svc", image=image, deployment_config=aci)
    try:
        service.wait_for_deployment()
        assert (service.state, service.tags, service.auth_enabled) == ("Healthy", {"a": "b"}, True)
        request = urllib.request.Request(
            service.scoring_uri,
            data=b'{"data": [5]}',
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {service.get_keys()[1]}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(json.load(answer)) == [15]
    finally:
        service.delete()


def test_invalid_webservice_calls_are_refused(ws, config):
    with pytest.raises(WebserviceException, match="deployment_config"):
        Model.deploy(ws, "svc", [], config, "local")
    with pytest.raises(WebserviceException, match="Not A Name"):
        Model.deploy(ws, "Not A Name", [Model.register(ws, "m.json", "times")], config)
    with pytest.raises(WebserviceException, match="ImageNotFound"):
        Image(ws, "nothing")
    assert AksWebservice.deploy_configuration(num_replicas=2).values["workers"] == 2


def test_model_package_writes_a_dockerfile_and_aks_endpoint_is_refused_with_the_alternative(ws, config):
    model = Model.register(ws, "m.json", "times")
    made = Model.package(ws, [model], config, generate_dockerfile=True)
    made.wait_for_creation(show_output=True)
    made.save("away")
    assert (made.state, Path("away/Dockerfile").exists(), Path("away/start.py").exists()) == ("Succeeded", True, True)
    with pytest.raises(WebserviceException, match="not empty"):
        made.save("away")
    for refused in (lambda: AksEndpoint(ws, "e"), AksEndpoint.deploy_configuration):
        with pytest.raises(WebserviceException, match="an AksWebservice for each version"):
            refused()
    # A tag name without a value matches any value.
    model.add_tags({"area": "x"})
    assert [one.id for one in Model.list(ws, tags=["area"])] == [model.id]
    assert [one.id for one in Model.list(ws, tags=[["area", "y"]])] == []
