"""`memo profile`: what it prints and writes, and that it builds one layer only."""

from pathlib import Path

import pytest
import torch.distributed as dist
from layouts import tiny
from ranks import run_ranks

import memo
from memo.artifacts.attention_table import AttentionTable
from memo.artifacts.layer_profile import LayerProfile
from memo.cli.main import main
from memo.mesh import local_device
from memo.model.layer import TransformerLayer
from memo.train import profile as profile_module
from memo.train.build import build_mesh

LAYER = "--num-layers 6 --hidden-size 32 --seq-len 64 --device cpu --num-threads 1 --peak-tflops 1"


def profile(flags: str) -> int:
    return main(["profile", *LAYER.split(), *flags.split()])


def test_what_is_measured_is_printed_written_and_planned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    make = TransformerLayer.__init__
    monkeypatch.setattr(TransformerLayer, "__init__", lambda *args: (built.append(1), make(*args))[1])
    out, cache = tmp_path / "profile.json", tmp_path / "cache"
    assert profile(f"--out {out} --profile-cache {cache}") == 0
    assert len(built) == 1  # of six layers, and nothing else of the model
    printed = capsys.readouterr().out
    found = LayerProfile.load(out)
    (kept,) = cache.iterdir()
    assert LayerProfile.load(kept) == found
    lines = printed.splitlines()
    assert lines[:2] == [
        "one layer: h = 32, 4 heads (4 k/v) of 8, MLP 128 (gelu), fp32",
        "on 64 tokens x 1 in 8 tiles, tp 1 x cp 1",
    ]
    named = ["forward", "backward, nothing recomputed", *(f"recompute {group}" for group in ("qkv", "residual", "fc1"))]
    for start in [*named, "backward, all recomputed", "offload", "prefetch"]:
        assert sum(line.startswith(f"{start} ") for line in lines) == 1, start
    assert ["qkv", "24.00", "KiB"] in [line.split() for line in lines]  # 64 tokens x 3 x 32 x 4 bytes
    assert f"{sum(found.tensor_bytes.values()) / 1024:.2f} KiB" in printed
    assert "tiles (alpha)" in printed and "\nlimit          " in printed
    assert f"\nprofile        measured now, kept in {kept} and written to {out}\n" in printed
    made = memo.Trainer("gpt-tiny", mock_data=True, layer_profile=str(out), **_trainer_values())
    assert made.parts.chosen_swap is not None
    assert made.parts.chosen_swap.problem.forward_s == found.forward_s
    again = memo.Trainer("gpt-tiny", mock_data=True, profile_cache=str(cache), **_trainer_values())
    assert again.parts.chosen_swap is not None
    assert again.parts.chosen_swap.problem.backward_s == found.backward_s


def _trainer_values() -> dict[str, object]:
    values: dict[str, object] = {"num_layers": 6, "hidden_size": 32, "seq_length": 64}
    return {**values, "device": "cpu", "num_threads": 1, "peak_tflops": 1.0}


def test_it_measures_again_what_is_kept(tmp_path: Path) -> None:
    assert profile(f"--profile-cache {tmp_path}") == 0
    (kept,) = tmp_path.iterdir()
    before = LayerProfile.load(kept)
    assert profile(f"--profile-cache {tmp_path}") == 0
    assert LayerProfile.load(kept) != before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--offload-alpha off --seq-len 65", "65 tokens x 1 in 5"),
        ("--recompute-granularity full", "64 tokens x 1 in 8"),
    ],
)
def test_a_run_without_swapping_has_times_and_no_plan(
    flags: str, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(f"{flags} --profile-cache off") == 0
    printed = capsys.readouterr().out
    assert f"on {size} tiles" in printed  # 65 has no 8 equal parts
    assert "recompute fc1" in printed and "tiles (alpha)" not in printed
    assert printed.endswith("no plan: --offload-alpha off, or --recompute-granularity in its place\n")


def test_times_are_told_and_kept_even_where_no_plan_is_possible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    with pytest.raises(SystemExit) as refused:
        profile(f"--offload-alpha 0.5 --offload-host-memory-gib 1e-9 --profile-cache off --out {out}")
    assert refused.value.code == 2
    captured = capsys.readouterr()
    assert "recompute fc1" in captured.out and LayerProfile.load(out).forward_s > 0
    assert captured.err.startswith("error: host memory: even at alpha = 0")


def _on_two_stages(out: str) -> tuple[bool, str]:
    """Both stages of tp 1 x pp 2 profile; only rank 0 writes and prints."""
    printed: list[str] = []
    profile_module.print = lambda text, flush: printed.append(text)  # type: ignore[attr-defined]
    config = tiny(pp=2, offload_alpha="auto", profile_cache="off")
    own = f"{out}{dist.get_rank()}"
    profile_module._profile(config, build_mesh(config, dist.get_rank(), 2), local_device("cpu"), own)
    return Path(own).exists(), "\n".join(printed)


def test_on_several_ranks_the_first_tells(tmp_path: Path) -> None:
    (first_wrote, first_said), (second_wrote, second_said) = run_ranks(2, _on_two_stages, str(tmp_path / "out"))
    assert first_wrote and "tiles (alpha)" in first_said
    assert not second_wrote and second_said == ""


def test_attention_kernels_are_timed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(f"--attention --profile-cache {tmp_path}") == 0
    printed = capsys.readouterr().out
    for shape in ("causal", "packed"):
        assert f"  {shape}, 64 tokens, heads of 8, fp32, 4 heads (4 k/v), batch 1\n    cpu " in printed
    assert "attention: cpu (the one fused kernel of this device)\n" in printed
    (kept,) = tmp_path.glob("attention-*.json")
    assert f"kept in {kept}\n" in printed
    assert len(AttentionTable.load(kept).rows) == 2 and len(list(tmp_path.iterdir())) == 2
