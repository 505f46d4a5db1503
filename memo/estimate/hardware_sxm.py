"""Machines with SXM boards, whose shares of the peaks are fitted to published runs where there are any; and the CPU.

Peaks, rates and links are the vendors' (NVIDIA's data sheets of A100, A800, H100, H200 and B200: dense products, one
direction of a link). Memory is what nvidia-smi reports, in MiB, as users have published it (of A100, H100, A10, L40S
and L4: modal-client pull 2797 on GitHub; of the others: such listings in several repositories each); that of the H100
with 94 GB is the H100 NVL's. The cluster around the device is the paper's where a paper describes it, else NVIDIA's
reference machine. The shares of `Efficiency` are fitted where `source` says so; all others are assumed, and said to be.
benchmarks/simulator_accuracy.py holds them against the tables, and fits them again with each left out.
"""

from dataclasses import replace

from memo.estimate.gpu_peaks import BF16_PEAK_TFLOPS
from memo.estimate.hardware import Efficiency, Hardware

AMPERE = Efficiency(
    matmul=0.83,
    matmul_half_size=220,
    attention_forward=0.64,
    attention_backward=0.50,
    attention_half_head=32,
    memory=0.85,
    node=0.75,
    network=0.3,
    host_memory=0.7,
    kernel_s=20e-6,
    collective_s=60e-6,
    host_core_gb_per_s=8,
    host_kernel_s=40e-6,
    source="fitted, then rounded, on the 4D paper's table 3 and MEMO's tables 3 (rows of MEMO, 7B and 13B) and 4: "
    "matmul, matmul_half_size, attention_forward, attention_backward, kernel_s, collective_s, network; assumed: "
    "memory, node, host_memory, host_core_gb_per_s; host_kernel_s: CPU time of memo's program for each kernel on the "
    "emulated GPU, on one core of an EPYC; attention_half_head: FlashAttention-2 (arXiv 2307.08691), figures "
    "4 to 6; network and collective_s anew, without the rest, since products add weight gradients as Megatron-LM's do",
)

HOPPER = replace(
    AMPERE,
    matmul=0.535,
    matmul_half_size=128,
    attention_forward=0.5,
    attention_backward=0.42,
    node=0.67,
    network=0.7,
    kernel_s=2e-6,
    collective_s=60e-6,
    source="fitted, then rounded, on the 4D paper's table 4: matmul, node, network, kernel_s, collective_s (matmul "
    "anew, alone, since products add weight gradients as Megatron-LM's do, and since attention was chosen); attention: "
    "0.72 of what cuDNN 9.19 reaches alone on H200 at 32K tokens (github.com/NVIDIA/cudnn-frontend, "
    "benchmark/sdpa_benchmark_training: 688 and 581 TFLOP/s), which TRL's step of 1M tokens reaches with cuDNN; "
    "assumed: memory, matmul_half_size, host_memory, host_core_gb_per_s",
)

BLACKWELL = replace(
    HOPPER,
    matmul=0.48,
    matmul_half_size=16,
    attention_forward=0.5,
    attention_backward=0.33,
    memory=0.69,
    collective_s=33e-6,
    hop_s=8.6e-6,
    source="round figures from the kernels on B200 that SimuMax v1.2 measured (github.com/MooreThreads/SimuMax, commit "
    "4dcaae5, configs/system/b200_bf16_ceperm.json), attention counted as here; no step was fitted; others as on H100",
)

A100_40 = Hardware(
    name="a100-40",
    device="cuda",
    driver_name="NVIDIA A100-SXM4-40GB",
    capability=80,
    multiprocessors=108,
    peak_tflops={"bf16": BF16_PEAK_TFLOPS["A100-SXM4-40GB"], "fp32": 19.5, "fp64": 19.5},
    memory_gib=40960 / 1024,
    memory_gb_per_s=1555,
    offload_gb_per_s=10.7,
    prefetch_gb_per_s=10.7,
    copies_overlap=True,
    node_gb_per_s=300,
    network_gb_per_s=12.5,
    gpus_per_node=8,
    host_memory_gib=512,
    host_memory_gb_per_s=409.6,
    host_cores=128,
    efficiency=AMPERE,
    source="NVIDIA A100 data sheet; the 4D paper names no network: one HDR port (200 Gbit/s) for two devices assumed; "
    "copies as on a800-80; host: DGX A100's two EPYC 7742, eight channels of DDR4-3200 each",
)

A100_80 = replace(
    A100_40,
    name="a100-80",
    driver_name="NVIDIA A100-SXM4-80GB",
    memory_gib=81920 / 1024,
    memory_gb_per_s=2039,
    network_gb_per_s=25,
    host_memory_gib=2048,
    source="NVIDIA A100 and DGX A100 (640 GB) data sheets; copies as on a800-80",
)

A800_80 = replace(
    A100_40,
    name="a800-80",
    driver_name="NVIDIA A800-SXM4-80GB",
    memory_gib=81920 / 1024,
    memory_gb_per_s=2039,
    node_gb_per_s=200,
    network_gb_per_s=25,
    host_memory_gib=2048,
    source="MEMO, section 5.1: 8 devices a node, NVLink 400 GB/s both ways, InfiniBand 200 GB/s a node, 2 TB of host "
    "memory; its 32 GB/s to the host is the link's peak: 10.7 GB/s are fitted on table 4, full swapping; CPUs of DGX "
    "A100 assumed",
)

H100_94 = Hardware(
    name="h100-94",
    device="cuda",
    driver_name="NVIDIA H100",
    capability=90,
    multiprocessors=132,
    peak_tflops={"bf16": BF16_PEAK_TFLOPS["H100"], "fp32": 66.9, "fp64": 66.9},
    memory_gib=95830 / 1024,
    memory_gb_per_s=2400,
    offload_gb_per_s=25,
    prefetch_gb_per_s=25,
    copies_overlap=True,
    node_gb_per_s=450,
    network_gb_per_s=25,
    gpus_per_node=4,
    host_memory_gib=768,
    host_memory_gb_per_s=614.4,
    host_cores=112,
    efficiency=HOPPER,
    source="NVIDIA H100 SXM data sheet; the 4D paper names no cluster: four devices a node with one NDR200 port each "
    "assumed; copies: 0.4 of PCIe 5.0 x16 assumed, twice what a800-80 reaches; CPUs of DGX H100 assumed",
)

H100_80 = replace(
    H100_94,
    name="h100-80",
    driver_name="NVIDIA H100 80GB HBM3",
    memory_gib=81559 / 1024,
    memory_gb_per_s=3350,
    network_gb_per_s=50,
    gpus_per_node=8,
    host_memory_gib=2048,
    source="NVIDIA H100 SXM and DGX H100 data sheets (two Xeon 8480C, eight channels of DDR5-4800 each); copies as on "
    "h100-94; shares not measured here",
)

H200 = replace(
    H100_80,
    name="h200",
    driver_name="NVIDIA H200",
    memory_gib=143771 / 1024,
    memory_gb_per_s=4800,
    source="NVIDIA H200 SXM and DGX H200 data sheets; copies as on h100-94; shares not measured here",
)

B200 = replace(
    H100_80,
    name="b200",
    driver_name="NVIDIA B200",
    capability=100,
    multiprocessors=148,
    peak_tflops={"bf16": BF16_PEAK_TFLOPS["B200"], "fp32": 75.0, "fp64": 37.0},
    memory_gib=183359 / 1024,
    memory_gb_per_s=7700,
    node_gb_per_s=900,
    host_memory_gb_per_s=716.8,
    efficiency=BLACKWELL,
    source="NVIDIA HGX and DGX B200 data sheets (two Xeon 8570, eight channels of DDR5-5600 each); copies as on "
    "h100-94",
)

CPU = Hardware(
    name="cpu",
    device="cpu",
    driver_name="",
    capability=0,
    multiprocessors=0,
    peak_tflops={"bf16": 0.1, "fp32": 0.1, "fp64": 0.05},
    memory_gib=4,
    memory_gb_per_s=10,
    offload_gb_per_s=4,
    prefetch_gb_per_s=4,
    copies_overlap=False,
    node_gb_per_s=2,
    network_gb_per_s=1,
    gpus_per_node=8,
    host_memory_gib=32,
    host_memory_gb_per_s=20,
    host_cores=2,
    efficiency=replace(
        AMPERE,
        attention_forward=0.3,
        attention_backward=0.3,
        memory=0.7,
        node=0.5,
        network=0.5,
        collective_s=1e-4,
        host_kernel_s=0.0,
        source="assumed: an order of magnitude for trying things out",
    ),
    source="one rank on a few cores, assumed; describe yours in a file, or give --peak-tflops",
)
