"""What is said of configs that do not go together, kept beside this file, and what configs of others become.

See ``tests/pool/kept_texts.py`` for how to keep other texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from kept_texts import check_kept, shown

from paceline.config.load import config_from_dict
from paceline.config.suggest import translate_config
from paceline.errors import ConfigError

KEPT = Path(__file__).parent / "kept"
BASE = """
model: {kind: gpt, layers: 4, heads: 4, width: 64}
data: {kind: synthetic_tokens, samples: 512, context: 32, vocab_size: 128}
train: {steps: 4, global_batch: 16}
parallel: {ranks: 4, device: cpu}
"""
# Each is merged into the config above: alone it is sound.
CHANGES = """
- {}
- {parallel: {ranks: 3}}
- {parallel: {pipeline: 2}}
- {parallel: {pipeline: 3}}
- {parallel: {pipeline: 8, ranks: 8}}
- {parallel: {pipeline: 2, strategy: fsdp}}
- {parallel: {pipeline: 2, strategy: zero2}}
- {parallel: {pipeline: 2, tensor: 2, strategy: zero1}}
- {parallel: {tensor: 3}}
- {parallel: {tensor: 4}}
- {parallel: {tensor: 8, ranks: 8}}
- {parallel: {pipeline: 2, schedule: interleaved}}
- {parallel: {pipeline: 2, schedule: zero_bubble}}
- {parallel: {schedule: gpipe}}
- {parallel: {strategy: hybrid, shard_ranks: 3}}
- {parallel: {strategy: hybrid, shard_ranks: 2}}
- {parallel: {strategy: zero9}}
- {parallel: {strategy: auto, pipeline: 2}}
- {parallel: {ranks: 0}}
- {parallel: {ranks: many}}
- {parallel: {devise: cpu}}
- {parallel: {context: 2}}
- {parallel: {context: 3}}
- {parallel: {context: 2, strategy: auto}}
- {parallel: {contexts: 2}}
- {train: {global_batch: 6}}
- {train: {global_batch: 16, microbatch: 3}}
- {train: {global_batch: 16, microbatch: 2, accumulate: 4}}
- {train: {microbatch: 4, global_batch: null}}
- {train: {steps: 4, epochs: 2}}
- {train: {precision: bf17}}
- {train: {precision: fp16}}
- {train: {precision: fp8}}
- {train: {eval_every: 2}}
- {train: {global_batch: 100000}}
- {optim: {lr: -1}}
- {optim: {kind: adamw, momentum: 0.9}}
- {optim: {kind: sgd, momentum: 0.9, nesterov: true}}
- {optim: {kind: muon}}
- {optim: {kind: muon}, parallel: {tensor: 2}}
- {optim: {schedule: {kind: cosine, warmup_steps: 9}}}
- {optim: {schedule: {kind: step}}}
- {optim: {clip_norm: 0}}
- {memory: {checkpoint_activations: selective}}
- {memory: {checkpoint_activations: sometimes}}
- {memory: {offload: optimizer}}
- {memory: {offload: optimizer}, parallel: {strategy: zero2}}
- {comm: {compression: {policy: topk, ratio: 2}}}
- {comm: {compression: {policy: topk, ratio: 0.1}}, parallel: {strategy: fsdp}}
- {comm: {compression: {policy: powersgd, ratio: 0.1}}}
- {comm: {algorithm: ring}}
- {comm: {algorithm: tree}, parallel: {device: cuda}}
- {comm: {backend: nccl}}
- {comm: {bucket_mb: 0}}
- {checkpoint: {every_steps: 0}}
- {checkpoint: {keep: 0}}
- {recovery: {max_restarts: -1}}
- {recovery: {on_spike: roll_back}}
- {monitor: {tensorbord: true}}
- {model: {heads: 3}}
- {model: {kv_heads: 3}}
- {model: {kind: mlp, hidden: [8]}}
- {model: {kind: resnet, depth: 19}}
- {model: {compile: maybe}}
- {model: {dropout: 1.5}}
- {data: {kind: digits}}
- {data: {kind: synthetic_tokens, samples: 2}}
- {data: {workers: -1}}
- {data: {kind: text}}
- {seeds: 3}
- {name: "a/b"}
"""
THEIRS = """
- {}
- {model: cnn, epochs: 2}
- {model: transformer, batch_size: 32, num_gpus: 4, pipeline_parallelism: true, sharding_strategy: auto}
- {model: mlp, lr: 0.1, gradient_accumulation_steps: 4, mixed_precision: fp16, gradient_clipping: 1.0}
- {zero_stage: 2, fp16: {enabled: true}, train_batch_size: 64, offload_optimizer: {device: cpu}}
- {tensor_parallel_size: 2, sequence_parallel: true, activation_checkpointing: true, seed: 7}
"""


def merged(change: dict[str, Any]) -> dict[str, Any]:
    values = yaml.safe_load(BASE)
    for section, keys in change.items():
        if isinstance(keys, dict) and "kind" not in keys:
            values[section] = {**values.get(section, {}), **keys}
        else:
            values[section] = keys
    return {**values, **{key: value for key, value in change.items() if not isinstance(value, dict)}}


def said(values: dict[str, Any]) -> str:
    try:
        config_from_dict(values)
    except ConfigError as error:
        return str(error)
    return "sound"


def test_what_does_not_go_together_is_told_as_it_was() -> None:
    told = [
        f"{yaml.safe_dump(change, default_flow_style=True).strip()}\n{said(merged(change))}"
        for change in yaml.safe_load(CHANGES)
    ]
    check_kept(KEPT / "problems.txt", "\n\n".join(told))


def test_configs_of_others_become_what_they_became() -> None:
    found = [translate_config(theirs) for theirs in yaml.safe_load(THEIRS)]
    check_kept(KEPT / "translated.json", shown([{"values": values, "notes": tuple(notes)} for values, notes in found]))
