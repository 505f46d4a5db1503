"""Peak rates of matrix products of GPUs, by the whole name that their driver reports.

Parts of names would mislead: an L40 is not an L4, an A10G is not an A10, and an H100 NVL runs at lower clocks than the
H100 of an SXM board.
"""

_TFLOPS_BY_NAMES = {
    ("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe"): 312.0,
    ("A800-SXM4-80GB", "A800 80GB PCIe"): 312.0,
    ("A10",): 125.0,
    ("A10G",): 70.0,
    ("A30",): 165.0,
    ("A40",): 149.7,
    ("L4",): 121.0,
    ("L40",): 181.05,
    ("L40S",): 362.05,
    ("RTX A6000",): 154.8,
    ("GeForce RTX 3090",): 71.0,
    ("GeForce RTX 4090",): 165.2,
    ("GeForce RTX 5090",): 209.5,
    ("H100 PCIe", "H800 PCIe"): 756.0,
    ("H100 NVL", "H200 NVL"): 835.5,
    ("H100", "H100 80GB HBM3", "H800", "H200", "GH200 480GB"): 989.4,
    ("H20",): 148.0,
    ("RTX PRO 6000 Blackwell Workstation Edition",): 503.8,
    ("RTX PRO 6000 Blackwell Server Edition",): 480.0,
    ("B200", "B300 SXM6 AC"): 2250.0,
    ("GB200",): 2500.0,
    ("AMD Instinct MI300X", "AMD Instinct MI325X"): 1307.4,
    ("AMD Instinct MI355X",): 2516.6,
}
BF16_PEAK_TFLOPS = {name: tflops for names, tflops in _TFLOPS_BY_NAMES.items() for name in names}
"""TFLOP/s of dense products in bf16 with sums in fp32, by the name without "NVIDIA".

From the makers' data sheets; those of NVIDIA print twice as much, for sparse products. GPUs without bf16 in their
tensor cores, such as V100, are not listed.
"""


def bf16_peak_tflops(driver_name: str) -> float | None:
    """TFLOP/s of the GPU whose driver reports this name; None for GPUs that are not listed, such as MIG instances.

    Older drivers leave out the maker's name.
    """
    return BF16_PEAK_TFLOPS.get(driver_name.removeprefix("NVIDIA "))
