"""Cards in PCIe slots, Grace superchips and AMD's Instinct: machines that memo plans for but has not been fitted to.

Of the GPU itself (peaks, rates, multiprocessors) the vendors' data sheets of 2020 to 2025 are taken: dense products
with sums in fp32. Memory is what nvidia-smi reports, in MiB, with error correction on where the card has it, as users
have published it; of AMD's only the data sheets' is known. The node around it is assumed: nobody sells all cards in one
node, so the host's memory and the number of GPUs are those of servers that clouds rent out. A hardware file,
--host-memory-gib and --gpu-memory-gib say what yours has. The rates to the host are those that the fitted machines
reach with the same generation of PCIe.
"""

from dataclasses import replace

from memo.estimate.gpu_peaks import BF16_PEAK_TFLOPS
from memo.estimate.hardware import Efficiency, Hardware
from memo.estimate.hardware_sxm import A100_40, AMPERE, B200, BLACKWELL, H100_80, H200, HOPPER


def _assumed(shares: Efficiency, as_of: str, **changes: float) -> Efficiency:
    return replace(shares, **changes, source=f"assumed: those of {as_of}, not fitted to this GPU")


_AMPERE_CARD = _assumed(AMPERE, "A100 and A800")
_ADA_CARD = _assumed(AMPERE, "A100 and A800, whose attention kernels it runs")
_HOPPER_CARD = _assumed(HOPPER, "H100 SXM")
_BLACKWELL_BOARD = _assumed(BLACKWELL, "B200")
_CDNA = _assumed(HOPPER, "H100 SXM, with matrix products at 0.47", matmul=0.47)

_SERVER = "; assumed: a server of eight, switches of PCIe between them, two EPYC 7763, one port of 400 Gbit/s for all"
_OPEN_SERVER = "; assumed: a server of eight without peer access, so messages pass through host memory; 64 GiB a GPU"

A100_40_PCIE = replace(
    A100_40,
    name="a100-40-pcie",
    driver_name="NVIDIA A100-PCIE-40GB",
    node_gb_per_s=25,
    network_gb_per_s=6.25,
    host_memory_gib=1024,
    efficiency=_AMPERE_CARD,
    source="NVIDIA A100 PCIe data sheet" + _SERVER,
)
A100_80_PCIE = replace(
    A100_40_PCIE,
    name="a100-80-pcie",
    driver_name="NVIDIA A100 80GB PCIe",
    memory_gib=81920 / 1024,
    memory_gb_per_s=1935,
)


def _ampere(name: str, chip: str, multiprocessors: int, fp32: float, memory_mib: int, rate: float) -> Hardware:
    return replace(
        A100_40_PCIE,
        name=name,
        driver_name=f"NVIDIA {chip}",
        capability=86,
        multiprocessors=multiprocessors,
        peak_tflops={"bf16": BF16_PEAK_TFLOPS[chip], "fp32": fp32, "fp64": fp32 / 64},
        memory_gib=memory_mib / 1024,
        memory_gb_per_s=rate,
        source=f"NVIDIA {chip} data sheet{_SERVER}",
    )


A10 = _ampere("a10", "A10", 72, 31.2, 23028, 600)
A40 = _ampere("a40", "A40", 84, 37.4, 46068, 696)
A6000 = _ampere("a6000", "RTX A6000", 84, 38.7, 49140, 768)
A10G = replace(
    _ampere("a10g", "A10G", 80, 35, 23028, 600),
    host_memory_gib=768,
    source="AWS's instances g5 (g5.48xlarge: eight GPUs, 768 GiB) and NVIDIA's table of A10G; no peer access assumed",
    node_gb_per_s=12,
)


def _ada(name: str, chip: str, multiprocessors: int, fp32: float, memory_mib: int, rate: float) -> Hardware:
    return replace(_ampere(name, chip, multiprocessors, fp32, memory_mib, rate), capability=89, efficiency=_ADA_CARD)


L4 = _ada("l4", "L4", 58, 30.3, 23034, 300)
L40 = _ada("l40", "L40", 142, 90.5, 46068, 864)
L40S = _ada("l40s", "L40S", 142, 91.6, 46068, 864)

RTX_3090 = replace(
    _ampere("rtx-3090", "GeForce RTX 3090", 82, 35.6, 24576, 936),
    node_gb_per_s=12,
    host_memory_gib=512,
    source="NVIDIA GeForce RTX 3090 data sheet" + _OPEN_SERVER,
)
RTX_4090 = replace(
    _ada("rtx-4090", "GeForce RTX 4090", 128, 82.6, 24564, 1008),
    node_gb_per_s=12,
    host_memory_gib=512,
    source="NVIDIA GeForce RTX 4090 data sheet" + _OPEN_SERVER,
)
RTX_5090 = replace(
    _ada("rtx-5090", "GeForce RTX 5090", 170, 104.8, 32607, 1792),
    capability=120,
    offload_gb_per_s=25,
    prefetch_gb_per_s=25,
    node_gb_per_s=24,
    host_memory_gib=512,
    source="NVIDIA GeForce RTX 5090 data sheet" + _OPEN_SERVER,
)
RTX_PRO_6000 = replace(
    _ada("rtx-pro-6000", "RTX PRO 6000 Blackwell Server Edition", 188, 120, 97887, 1597),
    capability=120,
    offload_gb_per_s=25,
    prefetch_gb_per_s=25,
    node_gb_per_s=50,
    host_memory_gb_per_s=614.4,
    source="NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet; its product in bf16 as of the Workstation "
    "Edition's architecture paper, scaled by fp32" + _SERVER,
)

H100_PCIE = replace(
    H100_80,
    name="h100-80-pcie",
    driver_name="NVIDIA H100 PCIe",
    multiprocessors=114,
    peak_tflops={"bf16": BF16_PEAK_TFLOPS["H100 PCIe"], "fp32": 51.2, "fp64": 51.2},
    memory_gb_per_s=2039,
    node_gb_per_s=50,
    network_gb_per_s=6.25,
    host_memory_gib=1024,
    efficiency=_HOPPER_CARD,
    source="NVIDIA H100 PCIe data sheet; assumed: a server of eight, switches of PCIe 5.0 between them, one port of "
    "400 Gbit/s for all, CPUs of DGX H100",
)
H100_NVL = replace(
    H100_PCIE,
    name="h100-nvl",
    driver_name="NVIDIA H100 NVL",
    multiprocessors=132,
    peak_tflops={"bf16": BF16_PEAK_TFLOPS["H100 NVL"], "fp32": 60.0, "fp64": 60.0},
    memory_gib=95830 / 1024,
    memory_gb_per_s=3938,
    source="NVIDIA H100 NVL data sheet; its bridges join pairs alone, so PCIe 5.0 between all; server as h100-80-pcie",
)
H20 = replace(
    H100_80,
    name="h20",
    driver_name="NVIDIA H20",
    multiprocessors=78,
    peak_tflops={"bf16": BF16_PEAK_TFLOPS["H20"], "fp32": 44.0, "fp64": 1.0},
    memory_gib=97871 / 1024,
    memory_gb_per_s=4000,
    efficiency=_HOPPER_CARD,
    source="NVIDIA HGX H20 data sheet; node as h100-80",
)
GH200 = replace(
    H200,
    name="gh200",
    driver_name="NVIDIA GH200 480GB",
    memory_gib=97871 / 1024,
    memory_gb_per_s=4000,
    offload_gb_per_s=180,
    prefetch_gb_per_s=180,
    node_gb_per_s=50,
    gpus_per_node=1,
    host_memory_gib=480,
    host_memory_gb_per_s=500,
    host_cores=72,
    efficiency=_HOPPER_CARD,
    source="NVIDIA GH200 data sheet: NVLink-C2C 450 GB/s each way, of which 0.4 is assumed as on h100-94; one a node, "
    "one port of 400 Gbit/s",
)
B300 = replace(
    B200,
    name="b300",
    driver_name="NVIDIA B300 SXM6 AC",
    capability=103,
    peak_tflops={"bf16": BF16_PEAK_TFLOPS["B300 SXM6 AC"], "fp32": 75.0, "fp64": 1.2},
    memory_gib=275040 / 1024,
    memory_gb_per_s=8000,
    network_gb_per_s=100,
    efficiency=_BLACKWELL_BOARD,
    source="NVIDIA HGX B300 data sheet; node as b200 with ports of 800 Gbit/s; copies as on h100-94",
)
GB200 = replace(
    B200,
    name="gb200",
    driver_name="NVIDIA GB200",
    peak_tflops={"bf16": BF16_PEAK_TFLOPS["GB200"], "fp32": 80.0, "fp64": 40.0},
    memory_gib=189471 / 1024,
    memory_gb_per_s=8000,
    offload_gb_per_s=90,
    prefetch_gb_per_s=90,
    gpus_per_node=4,
    host_memory_gib=960,
    host_memory_gb_per_s=1024,
    host_cores=144,
    efficiency=_BLACKWELL_BOARD,
    source="NVIDIA GB200 NVL72 data sheet: a tray of two Grace CPUs and four GPUs; two GPUs share a CPU's NVLink-C2C "
    "of 450 GB/s each way, of which 0.4 is assumed; NVLink to other trays is not modelled",
)


def _instinct(name: str, chip: str, units: int, fp32: float, fp64: float, gib: float, rate: float) -> Hardware:
    """`capability` 0: CUDA has none for them."""
    driver_name = f"AMD Instinct {chip}"
    return replace(
        H100_80,
        name=name,
        driver_name=driver_name,
        capability=0,
        multiprocessors=units,
        peak_tflops={"bf16": BF16_PEAK_TFLOPS[driver_name], "fp32": fp32, "fp64": fp64},
        memory_gib=gib,
        memory_gb_per_s=rate,
        node_gb_per_s=448,
        efficiency=_CDNA,
        source=f"AMD Instinct {chip} data sheet: seven links of 64 GB/s each way; host and network as h100-80. For "
        "plans alone: memo has not run on ROCm",
    )


MI300X = _instinct("mi300x", "MI300X", 304, 163.4, 163.4, 192, 5300)
MI325X = _instinct("mi325x", "MI325X", 304, 163.4, 163.4, 256, 6000)
MI355X = replace(
    _instinct("mi355x", "MI355X", 256, 157.3, 78.6, 288, 8000),
    node_gb_per_s=537,
    source="AMD Instinct MI355X data sheet: seven links of 76.8 GB/s each way; host and network as h100-80. For plans "
    "alone: memo has not run on ROCm",
)

CARDS: tuple[Hardware, ...] = (
    *(RTX_3090, RTX_4090, RTX_5090, RTX_PRO_6000, A10, A10G, A40, A6000, L4, L40, L40S),
    *(A100_40_PCIE, A100_80_PCIE, H100_PCIE, H100_NVL, H20, GH200, B300, GB200, MI300X, MI325X, MI355X),
)
