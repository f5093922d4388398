"""The CRD is what an API server accepts: a structural schema without pydantic's traps, bounded for CEL."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
import yaml

from polyrl.manifest.base import CLUSTER_ONLY_KEY
from polyrl.manifest.rules.between_fields import RULES
from polyrl.manifest.rules.transitions import TRANSITIONS
from polyrl.manifest.schema.crd import OPEN, Schema, custom_resource_definition, manifest_schema
from polyrl.manifest.schema.reference_page import manifest_page
from polyrl_cli.manifests.crd import crd_yaml

VERSION = custom_resource_definition()["spec"]["versions"][0]
SCHEMA: Schema = VERSION["schema"]["openAPIV3Schema"]

ALLOWED = {
    "type", "format", "description", "default", "enum", "pattern", "properties", "required", "items",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems",
    OPEN, "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
}  # fmt: skip
"""Of JSON Schema and the API server's extensions, what we use; `nullable`, `$ref`, `anyOf`, `title` are not in it."""

MANIFEST = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "a"},
    "spec": {"recipe": {"model": {"path": "m"}}},
}


def nodes(node: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")


NODES = list(nodes(SCHEMA, ""))
SPEC_NODES = [(path, node) for path, node in NODES if path.startswith(".spec")]


def test_every_node_has_one_type_and_only_known_words() -> None:
    for path, node in NODES:
        assert node["type"] in ("object", "array", "string", "integer", "number", "boolean"), path
        assert node.keys() <= ALLOWED, path


def test_an_exclusive_bound_is_a_flag_on_a_bound() -> None:
    flags = [(path, node, key) for path, node in NODES for key in node if key.startswith("exclusive")]
    assert flags
    for path, node, key in flags:
        assert node[key] is True, path
        assert key.removeprefix("exclusive").lower() in node, path


def test_everything_in_the_spec_is_bounded_so_that_cel_has_a_price() -> None:
    for path, node in SPEC_NODES:
        if node["type"] in ("integer", "number"):
            assert {"minimum", "maximum"} <= node.keys(), path
        if node["type"] == "string" and "enum" not in node:
            assert "maxLength" in node, path
        if node["type"] == "array":
            assert "maxItems" in node, path


def test_every_field_says_what_it_is_for() -> None:
    silent = [path for path, node in nodes(manifest_schema(), "") if path and not path.endswith("]")
              and not node.get("description") and "model_type" not in path]  # fmt: skip
    assert silent == []


def test_status_holds_whole_numbers_only() -> None:
    assert not [path for path, node in NODES if path.startswith(".status") and node["type"] == "number"]


def test_a_field_called_title_would_stay() -> None:
    from polyrl.manifest.schema.crd import _structural

    made = _structural({"type": "object", "title": "X", "properties": {"title": {"type": "string", "title": "T"}}}, {})
    assert made == {"type": "object", "properties": {"title": {"type": "string"}}}


def test_object_defaults_are_empty_so_that_each_field_fills_its_own() -> None:
    defaults = [node["default"] for _, node in NODES if "default" in node]
    assert all(default == {} for default in defaults if isinstance(default, dict))
    for path, node in NODES:
        if node.get("default") == {}:
            assert not node.get("required"), path


def json_schema(node: Schema) -> Any:
    """The structural schema as JSON Schema, in which an exclusive bound is a number."""
    made = {key: value for key, value in node.items() if not key.startswith("exclusive")}
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if node.get(exclusive):
            made[exclusive] = made.pop(inclusive)
    if "properties" in node:
        made["properties"] = {name: json_schema(child) for name, child in node["properties"].items()}
    if "items" in node:
        made["items"] = json_schema(node["items"])
    return made


def with_defaults(node: Schema, value: Any) -> Any:
    """What the API server does before it validates."""
    if isinstance(value, dict):
        fields = node.get("properties", {}).items()
        missing = {
            name: deepcopy(child["default"]) for name, child in fields if "default" in child and name not in value
        }
        value = value | missing
        return {key: with_defaults(node.get("properties", {}).get(key, {}), item) for key, item in value.items()}
    return [with_defaults(node.get("items", {}), item) for item in value] if isinstance(value, list) else value


def test_defaults_of_the_server_are_defaults_of_the_models() -> None:
    from polyrl.manifest.job import PolyRLJob
    from polyrl.manifest.spec import JobSpec

    filled = with_defaults(SCHEMA["properties"]["spec"], MANIFEST["spec"])
    # The server cannot count the GPUs of a pod, so it fills in nothing, and whoever reads the job does.
    filled["trainer"]["processesPerPod"] = 1
    assert filled == JobSpec.model_validate(MANIFEST["spec"]).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert PolyRLJob.model_fields.keys() >= {"spec", "status"}


VALIDATOR = jsonschema.Draft202012Validator(json_schema(SCHEMA))


def test_the_schema_is_one_and_takes_a_manifest_with_its_defaults() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema(SCHEMA))
    assert not list(VALIDATOR.iter_errors(with_defaults(SCHEMA, MANIFEST)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("spec.rollout.maxReplicas", 1025, id="too large"),
        pytest.param("spec.rollout.maxReplicas", "3", id="a text for a number"),
        pytest.param("spec.recipe.sampling.topP", 0, id="an open bound"),
        pytest.param("spec.recipe.model.config", {"hidden_size": 8}, id="a fresh model without a tokenizer"),
        pytest.param("spec.recipe.mode", "sft-rl", id="no such mode"),
        pytest.param("spec.rollout.template", {"spec": {"containers": []}}, id="a pod without containers"),
        pytest.param("metadata.name", "a" * 47, id="a name too long for its children"),
    ],
)
def test_the_schema_refuses(path: str, value: Any) -> None:
    manifest: Any = deepcopy(MANIFEST)
    node = manifest
    *parents, leaf = path.split(".")
    for key in parents:
        node = node.setdefault(key, {})
    node[leaf] = value
    assert [error for error in VALIDATOR.iter_errors(manifest) if ".".join(map(str, error.path)).startswith(path)]


def test_every_rule_is_served_with_a_message_and_a_field() -> None:
    served = SCHEMA["properties"]["spec"]["x-kubernetes-validations"]
    assert [check["rule"] for check in served] == [rule.cel for rule in RULES] + [change.cel for change in TRANSITIONS]
    for check in served:
        assert check["message"]
        assert not set("\n{") & set(check["message"])
        assert check["fieldPath"].startswith(".")


def test_what_kubectl_shows_exists() -> None:
    assert custom_resource_definition()["spec"]["names"]["shortNames"] == ["prl"]
    scale = VERSION["subresources"]["scale"]
    columns = [column["jsonPath"] for column in VERSION["additionalPrinterColumns"] if "[" not in column["jsonPath"]]
    known = {path for path, _ in NODES} | {".metadata.creationTimestamp"}
    assert {*scale.values(), *columns} <= known


def test_of_metadata_only_the_name_is_constrained() -> None:
    assert SCHEMA["properties"]["metadata"]["properties"].keys() == {"name"}


def test_the_file_fits_into_an_annotation_of_client_side_apply_and_reads_back() -> None:
    assert len(crd_yaml().encode()) < 262_144
    assert yaml.safe_load(crd_yaml()) == custom_resource_definition()


def test_the_page_names_every_field_and_marks_what_only_a_cluster_uses() -> None:
    page = manifest_page()
    for path, node in nodes(manifest_schema()["properties"]["spec"], "spec"):
        name = path.rpartition(".")[2].removesuffix("[]")
        assert f"`{name}`" in page or path == "spec", path
        if node.get(CLUSTER_ONLY_KEY):
            assert "*cluster*" in next(line for line in page.splitlines() if f"`{name}`" in line), path


def test_no_bound_that_is_excluded_is_a_fraction() -> None:
    """The API server compares whole numbers with the bound cut to one: 0 was not below 0.5."""

    def nodes(node: Any) -> Iterator[dict[str, Any]]:
        if isinstance(node, dict):
            yield node
            for child in node.values():
                yield from nodes(child)

    bounds = [(name, node[name]) for node in nodes(manifest_schema()) for name in ("minimum", "maximum")
              if name in node and node.get(f"exclusive{name.title()}")]  # fmt: skip
    assert bounds
    assert [(name, bound) for name, bound in bounds if bound != int(bound)] == []
