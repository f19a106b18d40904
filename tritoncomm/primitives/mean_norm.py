"""An estimate of the norm of the mean of vectors, from a short sketch of each.

A sketch has ``WIDTH`` sums of entries with random signs. The sum of the sketches of all ranks is the sketch of the sum
of their vectors, and the expectation of its squared norm is that of this sum: M. Charikar, K. Chen, M. Farach-Colton,
"Finding Frequent Items in Data Streams" (ICALP 2002); N. Alon, Y. Matias, M. Szegedy, "The Space Complexity of
Approximating the Frequency Moments" (STOC 1996). The standard deviation of the norm is about ``1 / sqrt(2 * WIDTH)``.
"""

from __future__ import annotations

import math

import torch

from tritoncomm.scheduler.rounds import AllReduce, Pattern

WIDTH = 509  # 3 % standard deviation. A prime: entries of one column of a matrix then go to different sums
_CHUNK = WIDTH << 9  # entries of a product that stay in the second-level cache
_GPU_CHUNK = WIDTH << 15  # few launches, and a product of 67 MB
_PHASE = "gradient norm"


def random_signs(numel: int, device: torch.device | str, seed: int = WIDTH) -> torch.Tensor:
    """Return a sign for each entry of a vector, int8 ``[numel]``, 1 or -1. They are the same on all ranks.

    Sketches of several vectors may be added up. Each vector needs another ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (numel,), generator=generator, dtype=torch.int8, device="cpu").mul_(2).sub_(1).to(device)


def sketch(vector: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return the sketch of ``vector`` (fp32 ``[numel]``), fp32 ``[WIDTH]``. It reads both arguments once."""
    sums = vector.new_zeros(WIDTH)
    chunk = _CHUNK if vector.device.type == "cpu" else _GPU_CHUNK
    buffer = vector.new_empty(min(chunk, vector.numel()))
    for part, own in zip(torch.split(vector, chunk), torch.split(signs, chunk), strict=True):
        signed = buffer[: part.numel()].copy_(own).mul_(part)
        whole = signed.numel() // WIDTH * WIDTH
        sums += signed[:whole].view(-1, WIDTH).sum(0)
        sums[: signed.numel() - whole] += signed[whole:]
    return sums


def norm_of_mean(own: torch.Tensor, world_size: int) -> Pattern[torch.Tensor]:
    """Return an estimate of the norm of the mean of vectors, fp64 ``[]``, the same on all ranks.

    Args:
        own: The sketch of this rank's vector.
        world_size: Number of vectors in the mean.
    """
    total = yield AllReduce(_PHASE, own)
    norm: torch.Tensor = total.double().norm()  # squares may overflow in fp32
    return norm / world_size


def gain_of_mean(vector: torch.Tensor, own: torch.Tensor, world_size: int) -> Pattern[torch.Tensor]:
    """Return how many times longer vectors are than their mean, fp32 ``[]``, the same on all ranks.

    That is the mean of their norms over an estimate of the norm of their mean. It is between 1, which equal vectors
    have, and the root of ``world_size``, which independent ones have.

    Args:
        vector: This rank's vector, fp32 ``[numel]``.
        own: Its sketch.
        world_size: Number of vectors.
    """
    norm = torch.linalg.vector_norm(vector).reshape(1)
    total = yield AllReduce("length of updates", torch.cat([own, norm]))
    ratio: torch.Tensor = total[-1] / torch.linalg.vector_norm(total[:-1])
    return ratio.nan_to_num(1.0).clamp(1.0, math.sqrt(world_size))
