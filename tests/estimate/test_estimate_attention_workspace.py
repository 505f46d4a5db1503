"""The account counts what attention's backward takes beside its results, of the kernels that the run has."""

import dataclasses

import pytest

from memo.config import RunConfig, preset
from memo.config.run import HardwareConfig
from memo.estimate.cases import read_case
from memo.estimate.memory_account import memory_account
from memo.estimate.program.attention import attention_backward
from memo.estimate.program.ledger import Ledger
from memo.estimate.program.passes import layer_passes
from memo.estimate.program.sizes import LayerSizes, layer_sizes
from memo.estimate.program.tiles import kept_by_layer
from memo.program.kinds import kind_of
from memo.search.estimating import run_config
from memo.search.question import ask
from memo.spec.attention_workspace import AttentionCall, backward_workspace

TOKENS = 4096


def tiny(**overrides: object) -> RunConfig:
    """A layer whose worst moment is attention's backward."""
    flags = {"mock_data": True, "device": "cuda", "params_dtype": "bf16", "vocab_size": 512, "seq_length": TOKENS}
    more: dict[str, object] = {"offload_alpha": "off", "recompute_granularity": "full", "ffn_hidden_size": 64}
    return dataclasses.replace(RunConfig(), model=preset("llama-tiny")).override({**flags, **more, **overrides})


def sizes(config: RunConfig) -> LayerSizes:
    return layer_sizes(config, threads=1)


def grads_bytes(z: LayerSizes) -> int:
    return z.tokens * (z.q + 2 * z.kv) * z.narrow


@pytest.mark.parametrize("backend", ["cudnn", "flash", "flash_attn", "flash_attn_3", "flash_attn_4"])
def test_a_whole_layer_takes_the_workspace_of_all_its_tokens(backend: str) -> None:
    z = sizes(tiny(attention_backend=backend))
    ledger = Ledger(never=z.never)
    attention_backward(ledger, z)
    call = AttentionCall(1, TOKENS, TOKENS, z.heads, z.kv_heads, z.head_dim, z.narrow)
    assert z.heads > z.kv_heads
    assert ledger.peak_bytes == grads_bytes(z) + sum(backward_workspace(backend, call).values())


def test_transformer_engine_gets_copies_too() -> None:
    peaks = []
    for backend in ("cudnn", "te"):
        z = sizes(tiny(attention_backend=backend))
        attention_backward(ledger := Ledger(never=z.never), z)
        peaks.append(ledger.peak_bytes)
    assert peaks[1] - peaks[0] == z.tokens * (3 * z.q + 2 * z.kv) * z.narrow


@pytest.mark.parametrize(("backend", "copies"), [("cudnn", 0), ("flash", 2)])
def test_what_is_strided_after_an_exchange_of_heads_is_copied(backend: str, copies: int) -> None:
    z = sizes(tiny(attention_backend=backend, cp=2, cp_comm_type="a2a"))
    peaks = []
    for a2a in (1, 2):  # the same kernel call, by ranks that exchanged heads and by one that did not
        share = z._replace(a2a=1, tokens=2 * z.tokens, heads=z.heads // 2, kv_heads=z.kv_heads // 2)
        attention_backward(ledger := Ledger(never=z.never), share if a2a == 1 else z)
        peaks.append(ledger)
    within = peaks[1].peak.alive
    assert within.get("copied for attention", 0) == copies * share.tokens * share.q * z.narrow
    assert "copied for attention" not in peaks[0].peak.alive


def test_a_sweep_takes_the_workspace_of_a_tile() -> None:
    whole = tiny()
    swept = tiny(recompute_granularity="none", offload_alpha=0.0, offload_granularity="tile", offload_tiles=16)
    sums = []
    for config, moved in ((whole, None), (swept, 0.0)):
        z = sizes(config)
        alive = layer_passes(z, kind_of(config.model), kept_by_layer(config, moved)).backward.peak.alive
        sums.append(alive["fp32 dq"])
        assert alive["fp32 dq"] == z.tokens // z.tiles * z.q * 4
    assert sums[0] == 16 * sums[1]


def test_auto_counts_as_what_it_takes_on_the_machine() -> None:
    assert memory_account(tiny(), 1, 0) == memory_account(tiny(attention_backend="cudnn"), 1, 0)
    for hardware, kernels in (("h100-80", "cudnn"), ("b200", "cudnn"), ("a100-80", "flash")):
        assert ask("llama-3.1-8b", 8, hardware=hardware).base.hardware.attention_backend == kernels
        case = read_case(
            {"model": "llama-3.1-8b", "seq_len": "65536", "gpus": "8", "tp": "8", "hardware": hardware}, "here"
        )
        assert run_config(case).hardware == HardwareConfig(device="cuda", attention_backend=kernels)  # type: ignore[arg-type]
