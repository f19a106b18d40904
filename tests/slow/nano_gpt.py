"""A training script as people write them: a small GPT that knows nothing of this library, in the manner of nanoGPT.

It trains on its own text. Arguments are ``--name=value``.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

backend, max_iters, batch_size, block_size, n_embd = "gloo", 600_000, 4, 32, 64
gradient_accumulation_steps, grad_clip, eval_interval = 2, 1.0, 20
for argument in sys.argv[1:]:
    key, value = argument.removeprefix("--").split("=")
    assert key in globals(), f"unknown argument {key}"
    globals()[key] = type(globals()[key])(value)

ddp = "RANK" in os.environ
if ddp:
    init_process_group(backend=backend)
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    master_process, seed_offset = int(os.environ["RANK"]) == 0, int(os.environ["RANK"])
    gradient_accumulation_steps //= int(os.environ["WORLD_SIZE"])
else:
    device, master_process, seed_offset = "cpu", True, 0
torch.manual_seed(1337 + seed_offset)


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, with a single head."""
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, -1)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Bytes to the loss of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h, self.lm_head = nn.Sequential(Block(), Block()), nn.Linear(n_embd, 256, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        logits = self.lm_head(self.h(self.wte(idx) + self.wpe.weight))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


data = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long().to(device)


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random pieces of the text, and what follows each byte."""
    starts = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    return tuple(torch.stack([data[i + shift : i + shift + block_size] for i in starts]) for shift in (0, 1))


model = GPT().to(device)
if ddp:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for iter_num in range(max_iters):
    for micro_step in range(max(1, gradient_accumulation_steps)):
        last = micro_step == max(1, gradient_accumulation_steps) - 1
        with model.no_sync() if ddp and not last else nullcontext():
            loss = model(*get_batch()) / max(1, gradient_accumulation_steps)
            loss.backward()
    if grad_clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % eval_interval == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}", flush=True)
if ddp:
    destroy_process_group()
