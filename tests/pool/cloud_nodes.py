"""What cloud-init writes to the nodes of ``infrastructure``."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "infrastructure"
TEMPLATE = FOLDER / "cloud-init.yaml.tftpl"
SCRIPT = FOLDER / "start_node.sh"


def rendered(**values: Any) -> dict[str, Any]:
    """Fills the template as Terraform does, for what it uses of the language; returns what cloud-init reads."""
    text = TEMPLATE.read_text(encoding="utf-8")
    text = re.sub(r"(?m)^%\{ (if .*|endif) ~\}\n", "", text)
    text = re.sub(r"\$\{jsonencode\((\w+)\)\}", lambda found: json.dumps(values[found[1]]), text)
    text = re.sub(r"\$\{(\w+)\}", lambda found: str(values[found[1]]), text)
    assert text.startswith("#cloud-config\n")
    whole: dict[str, Any] = yaml.safe_load(text)
    return whole


def node_values(index: int, size: int) -> dict[str, Any]:
    """Returns what a cloud gives the template for a node."""
    return {
        "node_index": index,
        "cluster_size": size,
        "gpus_per_node": 8,
        "training_epochs": 10,
        "save_frequency": 5,
        "config": "configs/digits.yaml",
        "source_url": "https://example.com/paceline.git",
        "source_ref": "main",
        "ssh_public_key": "ssh-ed25519 AAAA someone",
        "packages": ["git"],
        "mount_options": "--bind",
        "mount_source": "shared",
        "network": "infiniband",
        "start_node": base64.b64encode(SCRIPT.read_bytes()).decode(),
    }


def a_node(index: int, size: int) -> dict[str, Any]:
    return rendered(**node_values(index, size))


def files_of(node: dict[str, Any]) -> dict[str, str]:
    return {
        each["path"]: base64.b64decode(each["content"]).decode() if each.get("encoding") == "b64" else each["content"]
        for each in node["write_files"]
    }
