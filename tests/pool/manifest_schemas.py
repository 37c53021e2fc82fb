"""The schemas of all kinds of objects that our manifests have, in strict mode: a field that a kind has not is an error.

Kubernetes' own come with the package ``kubernetes-validate``, and those of JobSet and Kubeflow Trainer with
``kubeflow-trainer-api`` (both Apache 2.0, and part of the extra ``dev``). No index has a package with Volcano's: the
schema of its PodGroup is written here, from the fields of ``scheduling.volcano.sh/v1beta1``.

``CRDS=FOLDER pytest ...`` also holds them against a cluster's own definitions, in files of that folder:

    kubectl get crd jobsets.jobset.x-k8s.io -o yaml > FOLDER/jobset.yaml
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

Manifest = dict[str, Any]

VERSION = "1.37.0"
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


POD_GROUP = _object(
    apiVersion={"const": "scheduling.volcano.sh/v1beta1"},
    kind={"const": "PodGroup"},
    metadata=_object(name=_TEXT, namespace=_TEXT, labels={"additionalProperties": _TEXT}),
    spec=_object(
        minMember=_COUNT,
        minTaskMember={"additionalProperties": _COUNT},
        minResources={"additionalProperties": {"type": ["integer", "string"]}},
        queue=_TEXT | {"pattern": r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", "maxLength": 253},
        priorityClassName=_TEXT | {"maxLength": 253},
        networkTopology=_object(mode={"enum": ["hard", "soft"]}, highestTierAllowed=_COUNT, highestTierName=_TEXT),
    ),
)


@cache
def cluster_schemas() -> dict[tuple[str, str], Any]:
    """Returns the validators of the definitions in the folder ``CRDS``, by API version and kind; none without it."""
    if "CRDS" not in os.environ:
        return {}
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    found = {}
    for path in Path(os.environ["CRDS"]).glob("*.yaml"):
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
        for version in spec["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}  # the same for all kinds
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = validator(schema)
    return found


def strict(schema: Any) -> Any:
    """Returns a schema of Kubernetes as plain JSON schema, in which a field that it does not name is an error."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: each if name in ("enum", "default") else strict(each) for name, each in schema.items()}
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@cache
def strict_schema(kind: str, api_version: str) -> Any:
    """Returns the validator of a kind of object; kubernetes_validate itself would read 2 MB for each object."""
    utils = pytest.importorskip("kubernetes_validate.utils", reason="kubernetes-validate is part of the extra dev")
    jsonschema = pytest.importorskip("jsonschema")
    referencing = pytest.importorskip("referencing")
    if kind == "PodGroup":
        return jsonschema.Draft202012Validator(POD_GROUP)
    folder = f"kubernetes-json-schema/v{VERSION}-local-strict"
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = utils.schema_contents(f"{folder}/{kind.lower()}-{group}.json", VERSION)
    definitions = referencing.Resource.from_contents(utils.schema_contents(f"{folder}/_definitions.json", VERSION))
    registry = definitions @ (referencing.Resource.from_contents(schema) @ referencing.Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def validate(manifest: Manifest) -> None:
    """Checks a manifest against the strict schema of its kind, and pods inside of foreign kinds against theirs."""
    kind = manifest["kind"]
    if own := cluster_schemas().get((manifest["apiVersion"], kind)):
        own.validate(manifest)
    if kind in MODELS:
        model = getattr(pytest.importorskip("kubeflow_trainer_api.models"), MODELS[kind])
        assert model.from_dict(manifest).to_dict() == manifest  # what the model does not know would be missing
        for job in jobs_inside(manifest):
            strict_schema("Job", "batch/v1").validate(job)
    else:
        strict_schema(kind, manifest["apiVersion"]).validate(manifest)


def jobs_inside(manifest: Manifest) -> Iterator[Manifest]:
    spec = manifest["spec"]
    for each in spec.get("template", {}).get("spec", spec).get("replicatedJobs", []):
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, "spec": each["template"]["spec"]}


def pods_of(manifest: Manifest) -> Iterator[Manifest]:
    """Returns the specs of all pods of an object."""
    for job in jobs_inside(manifest) if manifest["kind"] in MODELS else [manifest]:
        if "containers" in (pod := job.get("spec", {}).get("template", {}).get("spec", {})):
            yield pod


def check_pod(pod: Manifest) -> None:
    """Holds a pod against Kubernetes' Pod Security Standard "restricted", which has all of "baseline" in it.

    No pod writes to its image either, or has the secret's value; all that is mounted is there.
    """
    security = pod["securityContext"]
    assert security["runAsNonRoot"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert pod["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in pod["volumes"]}
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"configMap", "persistentVolumeClaim", "emptyDir"}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        own = container["securityContext"]
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any("hostPort" in port for port in container.get("ports", []))
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
        for variable in container.get("env", []):
            if "SECRET" in variable["name"]:
                assert "value" not in variable
                assert variable["valueFrom"]["secretKeyRef"]["key"] == "secret"
