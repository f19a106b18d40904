"""A GPU for each rank, NCCL, and CUDA streams, emulated in one process without any of them. See README.md."""
