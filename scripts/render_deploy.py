"""Writes the rendered manifests of deploy/kubernetes anew; ``--check`` says which are out of date.

python scripts/render_deploy.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.config import load_config
from paceline.launch.kubernetes import render, to_text
from paceline.launch.kubernetes_options import KubernetesOptions
from paceline.launch.pod_patch import read_patch

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "kubernetes"
HEADER = "# Rendered by scripts/render_deploy.py; a test keeps it current.\n"
IMAGE = "paceline:0.1"
PATCH = FOLDER / "examples" / "patch.yaml"
RDMA = {"rdma/hca": 8}

# Each file: what is asked for, the config, and its overrides.
EXAMPLES: dict[str, tuple[KubernetesOptions, str, list[str]]] = {
    "base/run.yaml": (KubernetesOptions(name="digits", image=IMAGE, nodes=2), "configs/digits.yaml", []),
    "examples/job.yaml": (
        KubernetesOptions(
            name="gpt-pydoc",
            image=IMAGE,
            nodes=4,
            min_nodes=2,
            gpus=8,
            network=RDMA,
            gang="kueue",
            queue="training",
            scrape_from="monitoring",
            patch=read_patch(PATCH.read_text(encoding="utf-8")),
        ),
        "configs/gpt_pydoc.yaml",
        ["train.global_batch=96"],
    ),
    "examples/statefulset.yaml": (
        KubernetesOptions(name="distributed-training", image=IMAGE, kind="statefulset", nodes=2, gpus=4),
        "configs/gpt_pydoc.yaml",
        ["train.global_batch=64"],
    ),
    "examples/jobset.yaml": (
        KubernetesOptions(
            name="gpt-fsdp",
            image=IMAGE,
            kind="jobset",
            nodes=4,
            gpus=8,
            cpus=64,
            memory_gib=512,
            shm_gib=64,
            network=RDMA,
            gang="volcano",
            queue="training",
            claim="shared-runs",
            time_limit_s=48 * 3600,
        ),
        "configs/gpt_fsdp.yaml",
        ["train.global_batch=64"],
    ),
    "examples/trainjob.yaml": (
        KubernetesOptions(name="gpt-fsdp", image=IMAGE, kind="trainjob", nodes=2, gpus=8, network=RDMA),
        "configs/gpt_fsdp.yaml",
        ["train.global_batch=64"],
    ),
}


def rendered(name: str) -> str:
    """Returns the text that a file must have."""
    options, config, overrides = EXAMPLES[name]
    manifests = render(options, load_config(ROOT / config, overrides))
    return HEADER + to_text(manifests)


def main(*, check: bool) -> int:
    stale = []
    for name in EXAMPLES:
        path, text = FOLDER / name, rendered(name)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    if check and stale:
        sys.stderr.write(f"out of date: {', '.join(stale)}\n  run python scripts/render_deploy.py\n")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
