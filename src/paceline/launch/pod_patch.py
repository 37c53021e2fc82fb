"""A patch of the pods of a run, for all that has no option: a data volume, a pull secret, variables, tolerations.

It is a part of a pod's template, merged as Kubernetes merges strategically: mappings key by key, the lists of
``MERGE_KEYS`` item by item, and all other lists whole. ``null`` removes a key, ``$patch: delete`` an item, and
``$patch: replace`` takes a mapping as it stands.

    spec:
      imagePullSecrets: [{name: registry}]
      containers:
      - {name: paceline, env: [{name: HF_HOME, value: /data/hf}]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from paceline.bounded_yaml import load_yaml
from paceline.errors import Problem

WORKER = "paceline"  # the name that a patch has for the container that trains, whatever the kind of the run calls it
# By which key the items of a list are told apart, as in Kubernetes' API.
MERGE_KEYS = dict.fromkeys(("containers", "initContainers", "volumes", "env", "imagePullSecrets"), "name")
MERGE_KEYS |= {"volumeMounts": "mountPath", "hostAliases": "ip", "ports": "containerPort"}
MERGE_KEYS["topologySpreadConstraints"] = "topologyKey"
_TEXTS = ("labels", "annotations", "nodeSelector", "matchLabels")
_DIRECTIVE = "$patch"


def read_patch(text: str) -> dict[str, Any]:
    """Reads a patch in YAML or JSON. Raises ValueError with what it should be."""
    try:
        found = load_yaml(text)
        json.dumps(found, allow_nan=False)  # as which it goes to the cluster
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(f"YAML, with nothing that JSON has not: {error}") from None
    parts = found if isinstance(found, dict) else {}
    is_part = set(parts) <= {"metadata", "spec"} and all(isinstance(each, dict) for each in parts.values())
    if not parts or not is_part:
        raise ValueError("a part of a pod's template: metadata, spec, or both, with what is changed in them")
    _check_shape(parts)
    return parts


def _check_shape(part: Any, name: str = "") -> None:
    """Raises ValueError where a list or a mapping that ``merge`` or the run goes through is something else."""
    key = MERGE_KEYS.get(name)
    if key and not (isinstance(part, list) and all(_is_item(each, key) for each in part)):
        raise ValueError(f"a pod's template, in which {name} is a list of items that have a {key}")
    if name in _TEXTS:
        if not (isinstance(part, dict) and all(isinstance(each, str) for each in part.values())):
            raise ValueError(f"a pod's template, in which {name} has a text for each key: quote numbers, true, false")
    elif isinstance(part, dict):
        if part.get(_DIRECTIVE, "replace") not in ("delete", "replace"):
            raise ValueError(f"a pod's template, in which {_DIRECTIVE} is delete or replace")
        for inner, value in part.items():
            if value is not None:
                _check_shape(value, inner)
    elif isinstance(part, list):
        for value in part:
            _check_shape(value)


def _is_item(part: Any, key: str) -> bool:
    return isinstance(part, dict) and isinstance(part.get(key), str | int)


def merge(old: Any, new: Any, name: str = "") -> Any:
    """Returns ``old`` with what ``new`` changes in it; ``name``: under which key they stand."""
    if isinstance(new, Mapping):
        kept = dict(old) if isinstance(old, Mapping) and _DIRECTIVE not in new else {}
        for key, value in new.items():
            if value is None:
                kept.pop(key, None)
            elif key != _DIRECTIVE:
                kept[key] = merge(kept.get(key), value, key)
        return kept
    if not isinstance(new, list) or (key := MERGE_KEYS.get(name)) is None:
        return new
    items = {each.get(key): each for each in old or []}
    for each in new:
        if each.get(_DIRECTIVE) == "delete":
            items.pop(each.get(key), None)
        else:
            items[each.get(key)] = merge(items.get(each.get(key)), each)
    return list(items.values())


def patch_problems(pod: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[Problem]:
    """Finds what a patch has made of a pod that cannot work. ``labels``: those by which its run finds it."""
    changed = {key for key, value in labels.items() if pod["metadata"].get("labels", {}).get(key) != value}
    if changed:
        rule = "the run and its network policy find pods by them"
        yield Problem(what=f"the patch changes the labels {', '.join(sorted(changed))}", rule=rule, fix="add others")
    volumes = [each["name"] for each in pod["spec"].get("volumes", [])]
    for container in [*pod["spec"].get("containers", []), *pod["spec"].get("initContainers", [])]:
        if "image" not in container:
            rule = f"the container that trains is {WORKER}, and one that the patch adds needs an image"
            what = f"the patch has a container {container.get('name')} without an image"
            yield Problem(what=what, rule=rule, fix=f"name it {WORKER}, or give it an image")
        for mount in container.get("volumeMounts", []):
            if mount.get("name") not in volumes:
                what = f"the patch mounts {mount.get('name')} at {mount.get('mountPath')}"
                rule = f"the pod's volumes are {', '.join(map(str, volumes))}"
                yield Problem(what=what, rule=rule, fix="add it to spec.volumes")
