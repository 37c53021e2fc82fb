"""Trains a model under torch's ``fully_shard`` and saves it with torch's DCP; started by torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_encoder import batch_of, build, train_step

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = build()
for layer in model.encoder.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
train_step(model, optimizer, batch_of((dist.get_rank(),)))
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optim": moments}, checkpoint_id=sys.argv[1])
dist.destroy_process_group()
