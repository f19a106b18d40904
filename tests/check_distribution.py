"""Build both distributions, check their contents, install the wheel into an empty environment, and import it.

``tox -e package`` runs all of it. ``contents`` stops before the empty environment, which needs a network and a minute.
``installed`` only imports the installed packages. This is not a pytest module, because it builds and installs.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
import tritoncomm, tritoncomm_kernels, importlib.metadata, pathlib, torch
assert importlib.metadata.version("tritoncomm") == tritoncomm.__version__
assert "site-packages" in tritoncomm.__file__ and "site-packages" in tritoncomm_kernels.__file__
world = tritoncomm.SimulatedWorld(tritoncomm.recipe("oktopk", density=0.1), 3, 100)
print("imported", tritoncomm.__version__, world.step(torch.randn(3, 100))[0])
"""


def run(*command: str, cwd: Path) -> None:
    """Print a command and run it."""
    print("$", *command, flush=True)
    subprocess.run(command, cwd=cwd, check=True)


def check_contents(wheel: Path, source: Path) -> None:
    """Check that the wheel holds two typed packages only, and that the source distribution is complete."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tritoncomm", "tritoncomm_kernels"}, tops
    for package in ("tritoncomm", "tritoncomm_kernels"):
        assert f"{package}/py.typed" in names, names
    modules = [*ROOT.glob("tritoncomm/**/*.py"), *ROOT.glob("kernels/tritoncomm_kernels/**/*.py")]
    ours = {str(file.relative_to(ROOT)).removeprefix("kernels/") for file in modules}
    assert {name for name in names if name.endswith(".py")} == ours
    with tarfile.open(source) as archive:
        packed = {"/".join(name.split("/")[1:]) for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "tests/laws.py"} | {
        str(file.relative_to(ROOT)) for file in modules
    }
    assert needed <= packed, needed - packed
    assert not any("__pycache__" in name or name.startswith((".tox", ".venv")) for name in packed)


def main(only: str = "") -> None:
    """Run all checks in a temporary folder, or ``only`` a part of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if only == "installed":
            run(sys.executable, "-c", PROBE, cwd=folder)
            return
        run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT), cwd=folder)
        (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
        check_contents(wheel, source)
        if only == "contents":
            return
        run(sys.executable, "-m", "venv", "clean", cwd=folder)
        python = str(folder / "clean" / "bin" / "python")
        run(python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel), cwd=folder)
        run(python, "-c", PROBE, cwd=folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
