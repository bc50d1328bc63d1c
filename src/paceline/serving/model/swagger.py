"""OpenAPI documents of a script, made from its inference-schema decorators if it has any."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from paceline.serving.config import ServerConfig
from paceline.serving.wire import Documents

_ANY = {"type": "object", "example": {}}
_ERROR = {"type": "object", "properties": {"message": {"type": "string"}}}
_ANSWER, _WRONG = "What the model answers.", "What went wrong."


def is_decorated(function: object) -> bool:
    """Return whether the function has decorators of inference-schema."""
    util = _schema_util()
    return bool(util is not None and util.is_schema_decorated(function))


def documents(function: object, config: ServerConfig) -> Documents:
    """Return the documents "swagger2", "swagger3" and "openapi" of a scoring function.

    The files swagger.json, swagger2.json and swagger3.json beside the script replace generated documents. "swagger2" is
    missing if a type of inference-schema supports only version 3.
    """
    util = _schema_util()
    versions, input_schema, output_schema = ["2.0", "3.0"], _ANY, _ANY
    if util is not None:
        versions = list(util.get_supported_versions(function))
        if util.is_schema_decorated(function):
            input_schema, output_schema = util.get_input_schema(function), util.get_output_schema(function)
    documents_by_name: Documents = {}
    title, version = config.name, config.version
    if any(each in versions for each in ("2", "2.0")):
        documents_by_name["swagger2"] = swagger2(title, version, input_schema, output_schema)
    if any(each in versions for each in ("3", "3.0")):
        documents_by_name["swagger3"] = openapi(title, version, input_schema, output_schema)
    for key, names in (("swagger2", ("swagger.json", "swagger2.json")), ("swagger3", ("swagger3.json",))):
        for name in names:
            path = os.path.join(str(config.source_dir), name)
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    documents_by_name[key] = json.load(file)
                break
    if "swagger3" in documents_by_name:
        documents_by_name["openapi"] = documents_by_name["swagger3"]
    return documents_by_name


def swagger2(title: str, version: str, input_schema: object, output_schema: object) -> dict[str, object]:
    answer = {"description": _ANSWER, "schema": {"$ref": "#/definitions/ServiceOutput"}}
    wrong = {"description": _WRONG, "schema": {"$ref": "#/definitions/ErrorResponse"}}
    body = {"name": "serviceInputPayload", "in": "body", "schema": {"$ref": "#/definitions/ServiceInput"}}
    healthy = {"description": "Healthy", "schema": {"type": "string"}}
    return {
        "swagger": "2.0",
        "info": _info(title, version),
        "schemes": ["http", "https"],
        "consumes": ["application/json"],
        "produces": ["application/json"],
        "securityDefinitions": {"Bearer": {"type": "apiKey", "name": "Authorization", "in": "header"}},
        "paths": _paths(healthy, {"parameters": [body]}, answer, wrong),
        "definitions": {"ServiceInput": input_schema, "ServiceOutput": output_schema, "ErrorResponse": _ERROR},
    }


def openapi(
    title: str, version: str, input_schema: object, output_schema: object, schemas: dict[str, object] | None = None
) -> dict[str, object]:
    """Return an OpenAPI 3.0 document that describes /score."""

    def content(name: str) -> dict[str, object]:
        return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}

    healthy = {"description": "Healthy", "content": {"text/plain": {"schema": {"type": "string"}}}}
    body = {"requestBody": {"required": True, "content": content("ServiceInput")}}
    answer = {"description": _ANSWER, "content": content("ServiceOutput")}
    wrong = {"description": _WRONG, "content": content("ErrorResponse")}
    own = {"ServiceInput": input_schema, "ServiceOutput": output_schema, "ErrorResponse": _ERROR}
    return {
        "openapi": "3.0.3",
        "info": _info(title, version),
        "paths": _paths(healthy, body, answer, wrong),
        "components": {
            "securitySchemes": {"Bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {**own, **(schemas or {})},
        },
    }


def _info(title: str, version: str) -> dict[str, object]:
    return {"title": title, "version": version, "description": f"The service {title}"}


def _paths(healthy: object, body: Mapping[str, object], answer: object, wrong: object) -> dict[str, object]:
    score = {"operationId": "RunMLService", "security": [{"Bearer": []}], **body}
    return {
        "/": {"get": {"operationId": "ServiceHealthCheck", "responses": {"200": healthy, "default": wrong}}},
        "/score": {"post": {**score, "responses": {"200": answer, "default": wrong}}},
    }


def _schema_util() -> Any:
    import sys

    # A script that uses the decorators of inference_schema has imported this package.
    if "inference_schema" not in sys.modules:
        return None
    try:
        from inference_schema import schema_util
    except ImportError:
        return None
    return schema_util
