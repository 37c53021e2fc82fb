"""Keeps the schemas of foreign kinds of objects, for tests: python scripts/keep_crds.py FILE.yaml URL > SCHEMA.json.

FILE.yaml is a CustomResourceDefinition as its project publishes it at URL. Left out are descriptions, the state that a
controller writes, rules in a language that no JSON schema has (CEL), and the specs of pods: tests hold pods against the
schema of the Kubernetes that they run on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

_LEFT_OUT = (
    "x-kubernetes-validations",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
)
_POD = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def smaller(schema: Any) -> Any:
    if isinstance(schema, list):
        return [smaller(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "containers" in schema.get("properties", {}):
        return _POD
    is_text = isinstance(schema.get("description"), str)  # and no field of that name
    return {k: smaller(v) for k, v in schema.items() if k not in _LEFT_OUT and not (is_text and k == "description")}


def keep(definition: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns a definition with what a validator of manifests needs, and its source."""
    spec = definition["spec"]
    versions = []
    for version in spec["versions"]:
        schema = smaller(version["schema"]["openAPIV3Schema"])
        schema["properties"].pop("status", None)
        versions.append({"name": version["name"], "schema": {"openAPIV3Schema": schema}})
    return {
        "source": source,
        "licence": "Apache-2.0",
        "spec": {"group": spec["group"], "names": {"kind": spec["names"]["kind"]}, "versions": versions},
    }


if __name__ == "__main__":
    path, url = sys.argv[1:]
    print(json.dumps(keep(yaml.safe_load(Path(path).read_text(encoding="utf-8")), url), separators=(",", ":")))
