"""torchrun with ranks that are forked from it, because an import of PyTorch takes longer than many of the scripts.

It runs in a process of ``prepared_launcher.py``.
"""

from __future__ import annotations

import atexit
import runpy
import sys
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.rendezvous import dynamic_rendezvous


def main() -> None:
    """Run the command line of torchrun."""
    launch, given = run.elastic_launch, run.parse_args(sys.argv[1:])

    def forking(config: Any, entrypoint: object) -> Any:
        del entrypoint
        config.start_method = "fork"
        return lambda *_: launch(config, rank)(given.module, given.training_script, given.training_script_args)

    run.elastic_launch = forking
    # Each heartbeat names its caller in a debug log, from the sources of the whole stack: half a second of a processor.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    run.main(sys.argv[1:])


def rank(module: bool, script: str, arguments: list[str]) -> None:
    """Run ``script`` in this forked process."""
    sys.argv = [script, *arguments]
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = script.rpartition("/")[0]
            runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing ends without them


if __name__ == "__main__":
    main()
