"""The CPU kernel's corner cases, the choice of backend, and the signatures of the aten ops that we call."""

import sys
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memo.attention import cuda
from memo.attention.backends import CpuFlash, Saved
from memo.attention.select import BACKENDS, select_backend
from memo.config.run import HardwareConfig
from memo.errors import ConfigError

torch.set_num_threads(1)

# What each call in backends.py and cuda.py relies on: arguments in this order, those after "*" by keyword.
SCHEMAS = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        "query key value dropout_p is_causal * attn_mask scale",
        2,
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out query key value out logsumexp dropout_p is_causal * attn_mask scale",
        3,
    ),
    "_scaled_dot_product_cudnn_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask * scale",
        9,
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k "
        "max_q max_k dropout_p is_causal * scale",
        3,
    ),
    "_scaled_dot_product_flash_attention": (
        "query key value dropout_p is_causal return_debug_mask * scale",
        9,
    ),
    "_scaled_dot_product_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
        "philox_seed philox_offset * scale",
        3,
    ),
    "_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask * scale",
        5,
    ),
    "_flash_attention_forward_no_dropout_inplace": (
        "out query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask * scale",
        1,
    ),
    "_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
        "rng_state unused * scale",
        3,
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_aten_ops_have_the_signature_that_we_call(name: str) -> None:
    if name.endswith("_inplace") and not hasattr(torch.ops.aten, name):
        pytest.skip("this torch cannot write into a given output: it is copied")
    schema = getattr(torch.ops.aten, name).default._schema
    arguments, num_results = SCHEMAS[name]
    positional, keywords = (part.split() for part in arguments.split("*"))
    assert [x.name for x in schema.arguments if not x.kwarg_only] == positional
    assert set(keywords) <= {x.name for x in schema.arguments if x.kwarg_only}
    assert len(schema.returns) == num_results


@pytest.mark.parametrize("backend", [cuda.CudnnSdpa(), cuda.FlashSdpa()], ids=lambda x: x.name)
@pytest.mark.parametrize("s_k", [16, 24])
def test_cuda_shells_run_on_meta_tensors(backend: cuda.CudnnSdpa | cuda.FlashSdpa, s_k: int) -> None:
    """No GPU here: the dispatcher at least accepts every argument, and shapes come back as promised."""
    q = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, s_k, 64, dtype=torch.bfloat16, device="meta")
    out, lse = backend.forward(q, k, k, s_k == 16, 0.125)
    assert out.shape == q.shape and lse.shape == (2, 4, 16) and lse.dtype == torch.float32
    dq, dk, dv = backend.backward(out, Saved(q, k, k, out, lse), s_k == 16, 0.125)
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape


def test_cuda_varlen_shell_runs_on_meta_tensors() -> None:
    backend = cuda.FlashSdpa()
    q = torch.empty(48, 4, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(48, 2, 64, dtype=torch.bfloat16, device="meta")
    out, lse = backend.forward_varlen(q, k, k, (0, 1, 17, 48), 0.125)
    assert out.shape == q.shape and lse.shape == (4, 48)
    dq, dk, dv = backend.backward_varlen(out, Saved(q, k, k, out, lse), (0, 1, 17, 48), 0.125)
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape


class Called(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(cuda._flash_into is None, reason="this torch cannot write into a given output")
def test_flash_writes_into_the_output_without_a_copy() -> None:
    q = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="meta")
    place = torch.empty(16, 2, 4, 64, dtype=torch.bfloat16, device="meta").permute(1, 2, 0, 3)
    with Called() as called:
        out, lse = cuda.FlashSdpa().forward(q, q, q, True, 0.125, place)
    assert out is place and lse.shape == (2, 4, 16)
    assert "copy_" not in called.names and "_flash_attention_forward_no_dropout_inplace" in called.names
    packed = torch.empty(48, 4, 64, dtype=torch.bfloat16, device="meta")
    with Called() as called:
        out, lse = cuda.FlashSdpa().forward_varlen(packed, packed, packed, (0, 1, 48), 0.125, packed)
    assert out is packed and lse.shape == (4, 48) and "copy_" not in called.names


def test_cudnn_copies_into_the_output() -> None:
    q = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="meta")
    place = torch.empty_like(q)
    with Called() as called:
        out, _ = cuda.CudnnSdpa().forward(q, q, q, True, 0.125, place)
    assert out is place and "copy_" in called.names


def test_cpu_kernel_refuses_what_would_kill_it_or_be_masked_wrongly() -> None:
    q, empty, longer = (torch.randn(1, 2, s, 8) for s in (4, 0, 6))
    with pytest.raises(ValueError, match="s_q 4 and s_k 0"):
        CpuFlash().forward(q, empty, empty, False, 1.0)
    with pytest.raises(ValueError, match=r"causal block.*s_q 4 and s_k 6"):
        CpuFlash().forward(q, longer, longer, True, 1.0)


def test_cpu_backward_accepts_slices_of_a_global_lse_bit_for_bit() -> None:
    q, k, v, grad_out = (torch.randn(2, n, 16, 8, dtype=torch.bfloat16) for n in (4, 2, 2, 4))
    out, lse = CpuFlash().forward(q, k, v, True, 0.3)
    whole = torch.zeros(2, 4, 21)
    whole[:, :, 5:] = lse
    expected = CpuFlash().backward(grad_out, Saved(q, k, v, out, lse), True, 0.3)
    got = CpuFlash().backward(grad_out, Saved(q, k, v, out.contiguous(), whole[:, :, 5:]), True, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_select_on_cpu() -> None:
    assert select_backend("auto", "cpu").name == select_backend("cpu", "cpu").name == "cpu"
    with pytest.raises(ConfigError, match=r"'flash', which needs CUDA.*use 'auto', 'cpu' or 'torch'"):
        select_backend("flash", "cpu")
    with pytest.raises(ConfigError, match="known are " + ", ".join(BACKENDS)):
        select_backend("xformers", "cpu")


def test_select_on_cuda_follows_the_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    for major, chosen in ((9, "cudnn"), (8, "flash")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda major=major: (major, 0))
        assert select_backend("auto", "cuda").name == chosen
    assert select_backend("flash", "cuda").name == "flash"
    with pytest.raises(ConfigError, match="'cpu', but the device is 'cuda'"):
        select_backend("cpu", "cuda")


def test_the_flag_knows_every_backend() -> None:
    assert get_args(get_type_hints(HardwareConfig)["attention_backend"]) == BACKENDS


MODULES = [
    ("flash_attn", "flash_attn"),
    ("flash_attn_3", "flash_attn_interface"),
    ("flash_attn_4", "flash_attn"),
    ("te", "transformer_engine"),
]


@pytest.mark.parametrize(("name", "module"), MODULES)
def test_missing_package_is_named_with_the_remedy(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if not installed
    with pytest.raises(ConfigError, match=rf"'{name}'.*install .*or use 'auto'"):
        select_backend(name, "cuda")
