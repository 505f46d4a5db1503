"""Native code; everything else is in pyproject.toml.

memo builds its allocator and its emulated GPU (csrc/) itself on first use. If torch is importable while memo is
installed, the allocator is built ahead; if that fails, memo is installed without it:

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
"""{package: folders of csrc/ that it builds}."""
SOURCES = {
    path.relative_to(ROOT): package
    for package, folders in CSRC.items()
    for folder in folders
    for path in sorted((ROOT / "csrc" / folder).rglob("*"))
    if path.is_file()
}
"""{source file: package that contains it}."""


class PackSources(build_py):
    """Copies csrc/ into the packages that build it; a checkout uses it in place."""

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
    """Builds the allocators into the package, with the compiler call of the first use."""

    def build_extension(self, ext):
        sys.path.insert(0, str(ROOT))
        from memo.allocator import build

        device = next(d for d in build.DEVICES if ext.name.endswith(build.extension_name(d)))
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            build.compile_library(device, target)
        except Exception as error:  # no compiler, no CUDA: the first use will report it to users who need it
            self.warn(f"memo is installed without its {device} allocator: {error}")


def extensions():
    """The native extensions; none without torch, so that a wheel that pip builds in isolation serves every torch."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    names = ["_planned_cpu", *(["_planned_cuda"] if torch.version.cuda else [])]
    return [Extension(f"memo.allocator.{name}", [], optional=True) for name in names]


setup(ext_modules=extensions(), cmdclass={"build_py": PackSources, "build_ext": BuildAhead})
