"""Full size without numbers: the same program, the same requests for memory, and next to no memory taken."""

import json
import textwrap
from pathlib import Path

import pytest
from own_process import run

from memo.emulated_gpu.launch import Device
from memo.units import MIB

WITHOUT = Device(without_numbers=True, memory_gib=40, host_memory_gib=600)
MOST_TAKEN_KIB = 1 << 20
"""Resident set of a process with torch and memo (0.4 GiB), a piece of pinned memory, and some to spare."""

RESIDENT = "print(next(line.split()[1] for line in open('/proc/self/smaps_rollup') if line.startswith('Pss:')))"
"""In KiB; memory that is mapped several times counts once."""


def results(tmp_path: Path, program: str, device: Device = WITHOUT, **variables: str) -> list[str]:
    """The lines that it prints, and its resident set."""
    done = run(tmp_path, f"{textwrap.dedent(program)}\n{RESIDENT}", device, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_small_tensors_have_numbers_and_what_depends_on_large_ones_is_zero(tmp_path) -> None:
    printed = results(
        tmp_path,
        """
        import torch
        small = torch.arange(10, device="cuda")
        large = torch.full((1 << 30,), 2.0, device="cuda")
        scale = 7 - large.sum().log()
        print(small.sum().item(), small.tolist()[3], large.sum().item(), scale.item(), large[:3].cpu().tolist())
        host = torch.full((1 << 20,), 3.0)
        host.copy_(large[: 1 << 20])
        print(host.abs().max().item())
        other = torch.randn(1 << 30, device="cuda") @ torch.randn(1 << 30, device="cuda")
        print(other.item(), torch.cuda.memory_allocated() >> 30)
        experts = torch.empty(1 << 20, dtype=torch.int64, device="cuda").sort().values
        print(torch.searchsorted(experts, torch.arange(4, device="cuda"), right=True, out_int32=True).tolist())
        """,
    )
    assert printed[:3] == ["45 3 0.0 0.0 [0.0, 0.0, 0.0]", "0.0", "0.0 4"]
    assert printed[3] == "[262144, 524288, 786432, 1048576]", "each expert of a mixture has as many rows"
    assert int(printed[4]) < MOST_TAKEN_KIB


REACHING = """
    import torch
    store = torch.empty({tokens}, 2 * 16 * 128, dtype=torch.bfloat16, device="cuda")
    k, v = (x.unflatten(-1, (16, 128)).transpose(0, 1).unsqueeze(0) for x in store.chunk(2, dim=1))
    q = torch.empty(1, 16, 256, 128, dtype=torch.bfloat16, device="cuda")
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False)
    print(tuple(out.shape))
    try:
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    seed = torch.zeros(2, dtype=torch.uint64, device="cuda")
    options = (None, None, 256, {tokens}, 0.0, False, seed, seed[0])
    try:
        torch.ops.aten._scaled_dot_product_flash_attention_backward(out, q, k, v, out, lse, *options)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""


def test_attention_is_given_nothing_that_32_bits_do_not_reach(tmp_path) -> None:
    """Keys in rows of 4,096 elements, of which 524,288 are within 2^31: one token more, and only a kernel that is known
    to index in 64 bits takes them."""
    within = results(tmp_path, REACHING.format(tokens=1 << 19))
    assert within[:-1] == ["(1, 16, 256, 128)"]
    beyond = results(tmp_path, REACHING.format(tokens=(1 << 19) + 1))
    for name, line in zip(("cudnn_attention", "flash_attention_backward"), beyond[1:-1], strict=True):
        assert f"{name} is given [1, 16, 524289, 128] of strides" in line
        assert line.endswith("it is not known to index in 64 bits, so give it parts within 2^31")


def test_the_device_ends_where_it_would(tmp_path) -> None:
    for conf in ("", "expandable_segments:True"):
        printed = results(
            tmp_path,
            """
            import torch
            kept = []
            try:
                while True:
                    kept.append(torch.zeros(1 << 30, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError as error:
                print(len(kept), "total capacity of 40.00 GiB" in str(error))
            """,
            PYTORCH_ALLOC_CONF=conf,
        )
        assert printed[0] == "39 True"


def test_host_memory_can_be_pinned_and_written_beyond_what_this_machine_has(tmp_path) -> None:
    printed = results(
        tmp_path,
        """
        import torch
        from memo.errors import HostMemoryError
        from memo.emulated_gpu.face import EmulatedGpu
        from memo.estimate.host_memory import available_host_bytes, total_host_bytes
        from memo.executor.host_pool import HostPool
        gib = 1 << 30
        print(available_host_bytes() // gib, total_host_bytes() // gib)
        pool = HostPool(560, gib, torch.device("cuda"))  # more than a driver registers at once
        for index in range(0, 560, 140):
            pool.record(index).fill_(1)
        pinned = torch.empty(16 * gib, dtype=torch.uint8, pin_memory=True)
        pinned[:: 1 << 20] = 1
        device = torch.empty(gib, dtype=torch.uint8, device="cuda")
        device.copy_(pool.record(3), non_blocking=True)
        pool.record(4).copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        print(EmulatedGpu().taken_bytes()["pinned"] // gib)
        try:
            HostPool(100, gib, torch.device("cuda"))
        except HostMemoryError as error:
            print("cannot pin 100.00 GiB" in str(error))
        """,
    )
    assert printed[:3] == ["600 600", "576", "True"]
    assert int(printed[3]) < MOST_TAKEN_KIB


def test_a_shape_that_is_in_the_data_is_refused_by_name(tmp_path) -> None:
    printed = results(
        tmp_path,
        """
        import torch
        print(torch.tensor([0, 3], device="cuda").nonzero().tolist())
        try:
            torch.zeros(1 << 20, device="cuda").nonzero()
        except RuntimeError as error:
            print("aten::nonzero: the shape of its result is in its data" in str(error))
        """,
    )
    assert printed[:2] == ["[[1]]", "True"]


def test_collectives_without_numbers_are_still_operations(tmp_path) -> None:
    printed = results(
        tmp_path,
        f"""
        import torch, torch.distributed as dist
        dist.init_process_group("nccl", init_method="file://{tmp_path}/rendezvous", rank=0, world_size=1)
        small, large = torch.full((3,), 2.0, device="cuda"), torch.ones(3 << 30, device="cuda")
        dist.all_reduce(small)
        dist.all_reduce(large)
        print(small.tolist())
        from memo.emulated_gpu.face import EmulatedGpu
        print(EmulatedGpu().counts()["ncclAllReduce"])
        dist.destroy_process_group()
        """,
    )
    assert printed[:2] == ["[2.0, 2.0, 2.0]", "2"]
    assert int(printed[2]) < MOST_TAKEN_KIB


STEPS = """
    import json, torch, memo
    from memo.emulated_gpu.face import EmulatedGpu
    options = dict(mock_data=True, num_layers=3, seq_length=1024, micro_batch_size=1, global_batch_size=2,
                   train_iters=4, num_threads=1, progress=False, attention_backend="flash", device="cuda",
                   clip_grad=1e6, FLOW)

    def peaks():
        return {name: number for name, number in torch.cuda.memory_stats().items() if name.endswith("peak")}

    with memo.Trainer("llama-tiny", **options) as trainer:
        losses = [trainer.step().lm_loss]
        torch.cuda.empty_cache()  # measuring a layer's links leaves other blocks each time
        EmulatedGpu().clear()
        begin = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        losses.append(trainer.step().lm_loss)
        stats, counts = torch.cuda.memory_stats(), EmulatedGpu().counts()
        planned = trainer.parts.transients.statistics() if trainer.parts.transients else None
        steps = [peaks()]
        for _ in range(2):  # on a busy machine a thread may let go of a tensor later than in other steps
            torch.cuda.reset_peak_memory_stats()
            trainer.step()
            steps.append(peaks())
        print(json.dumps({
            "losses": losses,
            "peaks": {name: min(step[name] for step in steps) for name in steps[0]},
            "requests": stats["allocation.all.allocated"] - begin["allocation.all.allocated"],
            "device mallocs": stats["num_device_alloc"] - begin["num_device_alloc"],
            "calls": {name: n for name, n in counts.items() if "copy" in name or name in ("kernels", "cudaMalloc")},
            "planned": planned and [planned.hits, planned.fallbacks],
        }))
"""
FLOWS = {
    "half": "offload_alpha=0.5, memory_planner='off'",
    "states, planned": "offload_alpha=1.0, offload_states='all', memory_planner='auto', memory_planner_min_bytes=4096, "
    "memory_planner_from='rehearsal'",
}


@pytest.mark.parametrize("flow", FLOWS)
def test_a_run_asks_for_the_same_with_numbers_and_without(tmp_path, flow: str) -> None:
    """A step: what torch's allocators hold at most, how often they are asked, every copy and kernel."""
    program = STEPS.replace("FLOW", FLOWS[flow])
    with_numbers, without = (
        json.loads(results(tmp_path, program, Device(without_numbers=is_without))[-2]) for is_without in (False, True)
    )
    assert with_numbers.pop("losses")[0] > 1 and without.pop("losses") == [0.0, 0.0]
    assert without == with_numbers
    assert without["peaks"]["allocated_bytes.all.peak"] > 8 * MIB


def test_a_rank_of_eight_trains_at_full_length(tmp_path) -> None:
    """65,536 tokens of a 7B shape, four layers, three eighths of the tokens moved."""
    printed = results(
        tmp_path,
        """
        import torch, memo
        options = dict(mock_data=True, num_layers=4, seq_length=65536, global_batch_size=1, train_iters=2,
                       num_threads=1, progress=False, device="cuda", simulate_world="tp=8", profile_cache="off",
                       offload_alpha=0.375, admission=False, memory_planner="off")
        with memo.Trainer("gpt-7b", **options) as trainer:
            print([trainer.step().grad_norm for _ in range(2)])
            print(torch.cuda.max_memory_allocated() / 2**30)
        """,
    )
    assert printed[-3] == "[0.0, 0.0]"
    assert 2 < float(printed[-2]) < 4
    assert int(printed[-1]) < MOST_TAKEN_KIB
