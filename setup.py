"""Native code; everything else is in pyproject.toml.

memo builds its allocator and its emulated GPU (csrc/) itself on first use. Where torch is importable while memo is
installed, the allocator is built ahead, and where that fails memo is installed without:

    python setup.py build_ext --inplace
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
CSRC = {
    Path("memo", "allocator"): ("core", "torch", "cuda"),
    Path("memo", "emulated_gpu"): ("emulated_gpu",),
}
"""Folders of csrc/ by the package that builds them."""
SOURCES = {
    path.relative_to(ROOT): package
    for package, folders in CSRC.items()
    for folder in folders
    for path in sorted((ROOT / "csrc" / folder).rglob("*"))
    if path.is_file()
}
"""Packages by the source file that travels with them."""


class PackSources(build_py):
    """csrc/ travels inside the packages that build it; a checkout uses it where it is."""

    def run(self):
        super().run()
        for source, target in self._copies():
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))

    def get_source_files(self):
        return super().get_source_files() + [str(path) for path in SOURCES]

    def get_outputs(self, include_bytecode=1):
        return super().get_outputs(include_bytecode) + [str(target) for _, target in self._copies()]

    def _copies(self):
        if self.editable_mode:
            return []
        return [(source, Path(self.build_lib) / package / source) for source, package in SOURCES.items()]


class BuildAhead(build_ext):
    """The same compiler call as on first use, into the package."""

    def build_extension(self, ext):
        sys.path.insert(0, str(ROOT))
        from memo.allocator import build

        device = next(d for d in build.DEVICES if ext.name.endswith(build.extension_name(d)))
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            build.compile_library(device, target)
        except Exception as error:  # no compiler, no CUDA: first use will tell whoever needs it
            self.warn(f"memo is installed without its {device} allocator: {error}")


def extensions():
    """None without torch: a wheel that pip builds in isolation serves every torch."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    names = ["_planned_cpu", *(["_planned_cuda"] if torch.version.cuda else [])]
    return [Extension(f"memo.allocator.{name}", [], optional=True) for name in names]


setup(ext_modules=extensions(), cmdclass={"build_py": PackSources, "build_ext": BuildAhead})
