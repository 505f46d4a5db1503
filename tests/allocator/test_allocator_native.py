"""The native code itself: its own tests under sanitizers, and the CUDA part against CUDA's headers."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from memo.allocator import build
from memo.allocator.library import COUNTS, NUM_NAMED, REASONS, RawManagedUse
from memo.errors import AllocatorError

CSRC = Path(build.source_root())
STRICT = ("-std=c++17", "-O0", "-g1", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pthread")
SANITIZERS = {
    "rules": ("core_test.cpp", "-fsanitize=address,undefined"),
    "stress": ("core_stress_test.cpp", "-fsanitize=address,undefined"),
    "races": ("core_stress_test.cpp", "-fsanitize=thread"),
}


def _compiler() -> str:
    try:
        return build.find_compiler()
    except AllocatorError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["rules", pytest.param("stress", marks=pytest.mark.full), "races"])
def test_core_under_sanitizers(name: str, tmp_path: Path) -> None:
    source, sanitizer = SANITIZERS[name]
    program = tmp_path / name
    sources = [str(CSRC / "core" / "planned_core.cpp"), str(CSRC / "test" / source)]
    compiled = [_compiler(), *STRICT, sanitizer, "-fno-sanitize-recover=all", *sources, "-o", str(program)]
    built = subprocess.run(compiled, check=False, capture_output=True, text=True)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"the compiler has no {sanitizer}: {built.stderr.splitlines()[0]}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, check=False, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("core: ")


def test_cpu_allocator_in_c10(tmp_path: Path) -> None:
    """In one translation unit, because headers of torch and of the standard library are most of what is compiled."""
    home, program = Path(torch.__file__).parent, tmp_path / "c10"
    before = [*(CSRC / "core").glob("*.cpp"), CSRC / build.BINDINGS["cpu"]]
    sources = [*(f"-include{path}" for path in before), str(CSRC / "test" / "cpu_allocator_test.cpp")]
    flags = ["-std=c++20", "-O0", '-DMEMO_BUILD_KEY="none"', f"-I{home / 'include'}"]
    links = [f"-L{home / 'lib'}", "-lc10", f"-Wl,-rpath,{home / 'lib'}", "-pthread", "-o", str(program)]
    built = subprocess.run([_compiler(), *flags, *sources, *links], check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_benchmark_runs(tmp_path: Path) -> None:
    program = tmp_path / "bench"
    sources = [str(CSRC / "core" / "planned_core.cpp"), str(CSRC / "test" / "core_bench.cpp")]
    subprocess.run([_compiler(), *STRICT, *sources, "-o", str(program)], check=True, capture_output=True)
    printed = subprocess.run([str(program), "1"], capture_output=True, text=True, check=True).stdout
    assert "planned, 1000 live blocks" in printed


def test_python_reads_the_structs_as_they_lie(tmp_path: Path) -> None:
    """Names, order and sizes of the numbers that cross from C++ to Python."""
    order = ", ".join(f"&s.{name}" for name in COUNTS)
    reasons = ", ".join(f"Reason::k{reason.capitalize()}" for reason in REASONS)
    managed = ", ".join(f"&use.{name}" for name, _ in RawManagedUse._fields_)
    source = tmp_path / "layout.cpp"
    source.write_text(f"""
        #include "{CSRC}/core/statistics.h"
        #include "{CSRC}/core/event_log.h"
        #include "{CSRC}/core/managed_memory.h"
        using namespace memo;
        static_assert(kNumReasons == {len(REASONS)} && kNumNamed == {NUM_NAMED});
        static_assert(sizeof(Statistics) == 8 * ({len(COUNTS)} + {len(REASONS)} + 4 * {len(REASONS) * NUM_NAMED}));
        static_assert(sizeof(Event) == 3 * 8);
        static_assert(sizeof(ManagedUse) == {ctypes.sizeof(RawManagedUse)});
        int main() {{
          Statistics s{{}};
          const int64_t* counts[] = {{{order}}};
          ManagedUse use{{}};
          const int64_t* managed[] = {{{managed}}};
          for (int i = 0; i < {len(RawManagedUse._fields_)}; ++i) if (managed[i] != &use.limit_bytes + i) return 3;
          for (int i = 0; i < {len(COUNTS)}; ++i) if (counts[i] != &s.requests + i) return 1;
          const Reason reasons[] = {{{reasons}}};
          for (int i = 0; i < {len(REASONS)}; ++i) if (reasons[i] != static_cast<Reason>(i)) return 2;
          return 0;
        }}""")
    built = subprocess.run(
        [_compiler(), "-std=c++17", str(source), "-o", str(tmp_path / "layout")], check=False, capture_output=True
    )
    assert built.returncode == 0, built.stderr.decode()
    assert subprocess.run([str(tmp_path / "layout")], check=False).returncode == 0


def test_cuda_part_fits_torch(tmp_path: Path) -> None:
    """Torch wheels for the CPU have all of c10's CUDA headers but one, which only says how c10 was linked."""
    if not (Path(torch.__file__).parent / "include" / "c10" / "cuda" / "CUDACachingAllocator.h").exists():
        pytest.skip("this torch comes without c10's CUDA headers")
    try:
        build.cuda_include()
    except AllocatorError as error:
        pytest.skip(str(error))
    macros = Path("c10", "cuda", "impl", "cuda_cmake_macros.h")
    if not (Path(torch.__file__).parent / "include" / macros).exists():
        (tmp_path / macros).parent.mkdir(parents=True)
        (tmp_path / macros).write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    flags = (f"-I{tmp_path}", "-fsyntax-only", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror")
    compiled = build.command("cuda", _compiler(), tmp_path / "none", *flags)
    built = subprocess.run(compiled, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
