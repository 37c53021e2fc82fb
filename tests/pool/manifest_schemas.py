"""The schemas of all kinds of objects that our manifests have, in strict mode: a field that a kind has not is an error.

Kubernetes' own come with the package ``kubernetes-validate`` (Apache 2.0, part of the extra ``dev``). Those of JobSet,
Kubeflow Trainer and Volcano are kept in ``crds``: of the oldest release that docs/deployment.md names, and a newer one;
``scripts/keep_crds.py`` makes them, and each names its source.

``CRDS=FOLDER pytest ...`` also holds manifests against a cluster's own definitions, in files of that folder:

    kubectl get crd jobsets.jobset.x-k8s.io -o yaml > FOLDER/jobset.yaml
"""

from __future__ import annotations

import json
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
KEPT = Path(__file__).parent / "crds"
NESTED = ("JobSet", "TrainingRuntime")  # kinds that have jobs inside


@cache
def foreign_schemas() -> dict[tuple[str, str], list[Any]]:
    """Returns the validators of the kept definitions and of those in the folder ``CRDS``, by API version and kind."""
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    definitions = [json.loads(path.read_text(encoding="utf-8")) for path in KEPT.glob("*.json")]
    if "CRDS" in os.environ:
        paths = Path(os.environ["CRDS"]).glob("*.yaml")
        definitions += [yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths]
    found: dict[tuple[str, str], list[Any]] = {}
    for spec in (definition["spec"] for definition in definitions):
        for version in spec["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}  # the same for all kinds
            kinds = found.setdefault((f"{spec['group']}/{version['name']}", spec["names"]["kind"]), [])
            kinds.append(validator(schema))
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
    folder = f"kubernetes-json-schema/v{VERSION}-local-strict"
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = utils.schema_contents(f"{folder}/{kind.lower()}-{group}.json", VERSION)
    definitions = referencing.Resource.from_contents(utils.schema_contents(f"{folder}/_definitions.json", VERSION))
    registry = definitions @ (referencing.Resource.from_contents(schema) @ referencing.Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def validate(manifest: Manifest) -> None:
    """Checks a manifest against the strict schema of its kind, and pods inside of foreign kinds against theirs."""
    foreign = foreign_schemas().get((manifest["apiVersion"], manifest["kind"]))
    for schema in foreign or [strict_schema(manifest["kind"], manifest["apiVersion"])]:
        schema.validate(manifest)
    for job in jobs_inside(manifest):
        strict_schema("Job", "batch/v1").validate(job)


def jobs_inside(manifest: Manifest) -> Iterator[Manifest]:
    if manifest["kind"] not in NESTED:
        return
    spec = manifest["spec"]
    for each in spec.get("template", {}).get("spec", spec)["replicatedJobs"]:
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, "spec": each["template"]["spec"]}


def pods_of(manifest: Manifest) -> Iterator[Manifest]:
    """Returns the specs of all pods of an object."""
    for job in jobs_inside(manifest) if manifest["kind"] in NESTED else [manifest]:
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
