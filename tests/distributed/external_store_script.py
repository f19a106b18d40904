"""Started by torchrun in test_bad_network.py: trains with a store on a host of its own, and survives a lost host.

Arguments: address and port of the store, and a folder. A file in it says that the network has been changed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path += os.environ["PYTHONPATH"].split(os.pathsep)  # a forked process has not read it

from bad_network_workers import Plan, take_part

host, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(host, port, is_master=False)
run = f"{os.environ['TORCHELASTIC_RUN_ID']}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
dist.init_process_group("gloo", store=dist.PrefixStore(run, store), rank=rank, world_size=size)


def send(message: Any) -> None:
    """Note in a file that this rank has gone on, or that all are ready."""
    if message == "now" or message[1] == "went on":
        name = "ready" if message == "now" else f"went on {rank}"
        (folder / name).touch()


(folder / f"host {rank} {os.environ['GROUP_RANK']}").touch()
take_part(rank, Plan(size, -1, str(folder)), send)
os._exit(0)
