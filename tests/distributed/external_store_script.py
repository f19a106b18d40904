"""Started by torchrun in test_bad_network.py: trains with a store on a host of its own, and survives a lost host.

Arguments: address and port of the store, and a folder. A file in it says that the network has been changed.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import tritoncomm

host, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(host, port, is_master=False)
run = f"{os.environ['TORCHELASTIC_RUN_ID']}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
dist.init_process_group("gloo", store=dist.PrefixStore(run, store), rank=rank, world_size=size)

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
inner = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer = tritoncomm.wrap(inner, density=0.2, warmup_steps=0, timeout=timedelta(seconds=2))
batches = torch.Generator().manual_seed(rank)
step = 0
while step < 6:
    if step == 2:
        (folder / f"ready {rank} {os.environ['GROUP_RANK']}").touch()
        while not (folder / "now").exists():
            time.sleep(0.01)
    optimizer.zero_grad()
    x = torch.randn(8, 64, generator=batches)
    (model(x) - x.roll(1, 1)).square().mean().backward()
    try:
        optimizer.step()
        step += 1
    except tritoncomm.ExchangeError as error:
        print(f"rank {rank}: {error.peers} {error}", flush=True)
        left = [member for member in range(size) if member not in error.peers]
        if not error.peers or rank not in left:
            os._exit(0)
        group = dist.new_group(left, timeout=timedelta(seconds=10), use_local_synchronization=True)
        optimizer.reset_process_group(group)
parameters = [None] * dist.get_world_size(optimizer.process_group)
dist.all_gather_object(parameters, model.weight.tolist(), group=optimizer.process_group)
assert all(other == parameters[0] for other in parameters)
(folder / f"went on {rank}").touch()
os._exit(0)
