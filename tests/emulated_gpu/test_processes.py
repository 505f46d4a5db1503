"""What needs a process of its own: settings, expandable segments, errors that stick."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from own_process import outside, run

from memo.emulated_gpu.build import find_torch
from memo.emulated_gpu.launch import Device, environment


def test_the_device_is_what_the_settings_say(tmp_path) -> None:
    device = Device(name="NVIDIA A100-SXM4-40GB", memory_gib=40, capability=80, num_devices=2, multiprocessors=108)
    done = run(
        tmp_path,
        """
        import torch
        found = torch.cuda.get_device_properties(1)
        print(found.name, found.total_memory >> 30, torch.cuda.get_device_capability(), torch.cuda.device_count(),
              found.multi_processor_count)
        """,
        device,
    )
    assert done.stdout.split("\n")[0] == "NVIDIA A100-SXM4-40GB 40 (8, 0) 2 108", done.stderr


@pytest.mark.parametrize("capability", [86, 89, 103])
def test_cub_sorts_on_gpus_that_no_wheel_is_compiled_for(tmp_path: Path, capability: int) -> None:
    """CUB takes its kernels by the architecture of the binary that the device runs, 8.6 on an RTX 4090 (8.9)."""
    done = run(
        tmp_path,
        """
        import torch
        keys = torch.arange(10_000, 0, -1, device="cuda")
        print(torch.sort(keys, stable=True).values[:3].tolist())
        """,
        Device(capability=capability),
    )
    assert done.stdout.splitlines() == ["[1, 2, 3]"], done.stderr


def test_expandable_segments_grow_and_give_back(tmp_path) -> None:
    """One address range whose physical memory comes and goes: what fragments the default allocator fits here."""
    done = run(
        tmp_path,
        """
        import torch
        gib = 1 << 30
        blocks = [torch.empty(gib // 2, dtype=torch.uint8, device="cuda") for _ in range(6)]
        blocks[0].fill_(1)
        del blocks[1::2]
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        large = torch.empty(7 * gib // 4, dtype=torch.uint8, device="cuda")
        large[::gib] = 5
        taken = free - torch.cuda.mem_get_info()[0]
        print(blocks[0][:7].float().sum().item(), large[::gib].sum().item(), taken >= gib)
        from memo.emulated_gpu.face import EmulatedGpu
        counts = EmulatedGpu().counts()
        print(counts.get("cudaMalloc", 0), counts["cuMemCreate"] > 0)
        """,
        Device(memory_gib=4, schedule="lazy"),
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    assert done.stdout.splitlines() == ["7.0 10 True", "0 True"], done.stderr


def test_an_error_of_a_kernel_sticks(tmp_path) -> None:
    """Reference of cudaErrorLaunchFailure and cudaErrorIllegalAddress: the process must be ended."""
    done = run(
        tmp_path,
        """
        import ctypes, torch
        runtime = ctypes.CDLL("libcudart.so.13")
        tensor = torch.ones(3, device="cuda")
        runtime.emulated_kernel_failed(b"a kernel wrote where it must not")
        for _ in range(2):
            try:
                torch.cuda.synchronize()
                print("went on")
            except RuntimeError as error:
                print("launch failure" in str(error))
        print(runtime.cudaGetLastError(), runtime.cudaGetLastError(), runtime.cudaDeviceSynchronize())
        """,
    )
    assert done.stdout.splitlines() == ["True", "True", "719 719 719"], done.stderr
    assert "a kernel wrote where it must not" in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("memry_gib 3", "there is no setting 'memry_gib'"),
        ("memory_gib much", "'memory_gib' cannot be 'much'"),
        ("schedule never", "schedule is 'never': it can be eager, lazy or random"),
    ],
)
def test_settings_that_cannot_be_end_the_process(tmp_path, line: str, message: str) -> None:
    (tmp_path / "faulty.txt").write_text(line + "\n")
    program = "import torch; torch.cuda.init(); torch.empty(1, device='cuda')"
    done = run(tmp_path, program, EMULATED_GPU=str(tmp_path / "faulty.txt"))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("schedule", "segments"), [("eager", ""), ("lazy", ""), ("random", "expandable_segments:True")]
)
def test_memory_is_poisoned_when_it_is_new_and_when_it_is_freed(tmp_path, schedule: str, segments: str) -> None:
    """Work that was queued before a return still finds its numbers; a stream that nobody told of races with it."""
    done = run(
        tmp_path,
        """
        import ctypes, torch
        from memo.emulated_gpu.face import EmulatedGpu
        print(torch.empty(1000, device="cuda").isnan().all().item(), end=" ")
        tensor, host = torch.ones(1 << 20, device="cuda"), torch.empty(1 << 20, pin_memory=True)
        address, total = tensor.data_ptr(), tensor.sum()
        del tensor  # its block stays with torch's allocator, so that the address is still one of the device
        copied = ctypes.CDLL("libcudart.so.13").cudaMemcpy(
            ctypes.c_void_p(host.data_ptr()), ctypes.c_void_p(address), ctypes.c_size_t(4 << 20), 4)
        print(total.item() == 1 << 20, copied, host.isnan().all().item(), EmulatedGpu().races())
        side = torch.cuda.Stream()
        tensor = torch.ones(1 << 20, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total = tensor.sum()
        del tensor
        torch.cuda.synchronize()
        print(any("poison of freed memory" in text for text in EmulatedGpu().races()))
        """,
        Device(schedule=schedule, check_races=True, poison=True),
        PYTORCH_ALLOC_CONF=segments,
    )
    assert done.stdout.splitlines() == ["True True 0 True {}", "True"], done.stderr


PLANNED_STEP = """
    import memo
    with memo.Trainer("llama-tiny", mock_data=True, seq_length=64, num_layers=2, device="cuda", offload_alpha=0.5,
                      memory_planner="auto", memory_planner_min_bytes=4096, memory_planner_from="rehearsal",
                      progress=False) as trainer:
        print(trainer.step().iteration)
"""
REHEARSAL = """
    import memo.cli.main as cli
    cli.main("rehearse --gpu h100-80 --gpus 2 --model llama-tiny --seq-len 64 --tp 2 --offload-alpha 0.5".split())
    import sys
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(("program", "is_emulated", "last"), [(PLANNED_STEP, True, "1"), (REHEARSAL, False, "False")])
def test_an_installed_torch_stays_byte_for_byte_the_same(
    tmp_path: Path, program: str, is_emulated: bool, last: str
) -> None:
    """Nothing is written where torch, and what belongs to CUDA beside it, is installed: nothing added, nothing changed.

    But for Python's own cache of compiled modules. A file that is changed has another time of change (ctime), which no
    program can set back.
    """
    site = find_torch().parent
    folders = [site / "torch", *site.glob("nvidia"), *site.glob("torch-*.dist-info")]

    def state() -> dict[str, tuple[int, int, int]]:
        files = {str(path): path.stat() for folder in folders for path in folder.rglob("*") if path.is_file()}
        files = {path: found for path, found in files.items() if "__pycache__" not in path}
        return {path: (found.st_size, found.st_mtime_ns, found.st_ctime_ns) for path, found in files.items()}

    before = state()
    assert any(path.endswith("libtorch_cuda.so") for path in before)
    env = environment(Device(), tmp_path / "gpu.txt") if is_emulated else outside()
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=240)
    assert done.stdout.split()[-1:] == [last], done.stderr
    assert state() == before
