"""Schedulers that run exchange patterns, on a process group or with all ranks simulated in one process."""
