"""Runs exchange patterns: on a process group, or all ranks in one process."""
