"""Fresh environments with only memo's own dependencies, without a download: they link to the running environment's."""

import os
import subprocess
import venv
from importlib.metadata import distribution
from pathlib import Path

from requirements import needed


class Environment:
    """A fresh environment with the installed versions of packages, as if an index had filled it."""

    def __init__(self, folder: Path, *extras: str) -> None:
        """Make an environment with pip, and with the dependencies of memo and of its `extras`."""
        self.folder = folder
        venv.create(folder, with_pip=True, symlinks=True)
        (self.site,) = folder.glob("lib/python3*/site-packages")
        # Older Pythons bring a version that is too old for torch.
        self.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", folder=folder)
        for name in needed(*extras):
            self._link(name)

    def link_memo(self, checkout: Path) -> None:
        """Link memo as `pip install -e` does, which needs setuptools."""
        (self.site / "memo.pth").write_text(f"{checkout}\n{checkout / 'kernels'}\n")
        script = self.folder / "bin" / "memo"
        script.write_text('#!/bin/sh\nexec "$(dirname "$0")/python" -m memo "$@"\n')
        script.chmod(0o755)

    def run(self, *command: str, folder: Path, **variables: str) -> str:
        """Run a program of the environment in `folder`, and return its output. Raises AssertionError if it fails."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
        path = f"{self.folder / 'bin'}{os.pathsep}{kept['PATH']}"
        done = subprocess.run(
            command,
            check=False,
            cwd=folder,
            env=kept | {"PATH": path, "VIRTUAL_ENV": str(self.folder)} | variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}"
        return done.stdout

    def _link(self, name: str) -> None:
        """Link modules, libraries and metadata of a package under the names that an installation gives them."""
        installed = distribution(name)
        tops = {path.parts[0] for path in installed.files or [] if path.suffix != ".pth"} - {"..", "__pycache__"}
        for top in tops:  # a namespace may belong to several packages
            if not (self.site / top).is_symlink():
                (self.site / top).symlink_to(Path(str(installed.locate_file(top))).resolve())
