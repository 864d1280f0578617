"""``make release-check``: what a user gets who installs fsdp2 works, beside one version of torch and with nothing else.

It builds the sdist, and the wheel out of that; asks twine whether a package index can show them; installs the wheel into a bare
environment, far from the checkout, that has only what fsdp2 itself requires (torch and what torch requires are linked from the
environment that runs this, since they are gigabytes); imports every module that needs no extra; and runs the README's program on two
processes. An argument names a folder for the sdist and the wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
NEEDS_AN_EXTRA = ("fsdp2.cli", "fsdp2.migrate", "fsdp2.__main__", "fsdp2.testing")

IMPORTS = """
import importlib, pkgutil, sys
import fsdp2
skipped = tuple(sys.argv[1:])
names = [each.name for each in pkgutil.walk_packages(fsdp2.__path__, "fsdp2.") if not each.name.startswith(skipped)]
for name in names:
    importlib.import_module(name)
import torch
print(f"{len(names)} modules imported from {fsdp2.__path__[0]}, torch {torch.__version__}")
assert fsdp2.__path__[0].startswith(sys.prefix), fsdp2.__path__
"""


def run(*command: str | Path, cwd: Path) -> str:
    print("+", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(each) for each in command], cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        raise SystemExit(f"failed with status {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def required(names: list[str]) -> dict[str, Distribution]:
    """The installed distributions of these names, and those that they require, without extras."""
    found: dict[str, Distribution] = {}
    while names:
        name = canonicalize_name(names.pop())
        if name in found:
            continue
        found[name] = distribution(name)
        requirements = map(Requirement, found[name].requires or ())
        names += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def link(found: dict[str, Distribution], site: Path) -> None:
    """Put what these distributions have installed into ``site``, as links."""
    for each in found.values():
        for top in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            target = site / top
            if not target.exists():
                target.symlink_to(Path(str(each.locate_file(top))))


def main() -> None:
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(# train_tiny.py.*?)```", readme, re.DOTALL)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        builder, bare = folder / "builder", folder / "bare"
        venv.create(builder, with_pip=True)
        run(builder / "bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints/tools.txt", "build", "twine", cwd=folder)
        run(builder / "bin/python", "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
        (wheel,) = (folder / "dist").glob("*.whl")
        (sdist,) = (folder / "dist").glob("*.tar.gz")
        run(builder / "bin/twine", "check", "--strict", wheel, sdist, cwd=folder)
        venv.create(bare, with_pip=True)
        python = bare / "bin/python"
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
        link(required(["torch", "safetensors"]), site)
        run(python, "-m", "pip", "install", "-q", wheel, cwd=folder)
        run(python, "-m", "pip", "check", cwd=folder)
        run(python, "-c", IMPORTS, *NEEDS_AN_EXTRA, cwd=folder)
        run(bare / "bin/fsdp2", "--help", cwd=folder)
        run(bare / "bin/fsdp2", "explain", "MeshError", cwd=folder)
        (folder / "train_tiny.py").write_text(program)
        said = run(python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train_tiny.py", cwd=folder)
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
        if len(losses) != 20 or not losses[-1] < losses[0]:
            raise SystemExit(f"the README's program did not train: {losses}")
        for target in map(Path, sys.argv[1:]):
            shutil.copytree(folder / "dist", ROOT / target, dirs_exist_ok=True)
        print(f"{sdist.name} and {wheel.name} are fine with Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
