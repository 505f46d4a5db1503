"""--offload-granularity auto: layers whole where they fit, else swept in tiles, as all ranks agree before anything is
built."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from layouts import tiny
from ranks import run_ranks

import memo
from memo.config import RunConfig
from memo.config.run import read_toml
from memo.errors import ResourceError
from memo.estimate.memory_account import device_bytes
from memo.search import sweeping
from memo.spec.sweep import WHOLE, Sweep, sweep_of, with_sweep
from memo.units import GIB

TILES, TILE_TOKENS = 16, 32
SWEPT = Sweep(TILES, 4)
HIDDEN = Sweep(TILES, 4, hidden_on_host=True)


def run(**overrides: Any) -> RunConfig:
    values = {"seq_length": TILES * TILE_TOKENS, "offload_alpha": 0.0, "num_layers": 2, "params_dtype": "fp32"}
    values |= {"global_batch_size": 2, "peak_tflops": 1.0, "num_threads": 1, "progress": False, "profile_cache": "off"}
    return tiny("llama-tiny", **{**values, **overrides})


def cap_of(sweep: Sweep, world_size: int = 1, **overrides: Any) -> float:
    """--device-memory-gib that suffices for layers so, and a hundredth more."""
    return 1.01 * device_bytes(with_sweep(run(**overrides), sweep), world_size, 0) / GIB


def trainer(own_node: bool = False, **overrides: Any) -> memo.Trainer:
    """`own_node`: where each rank has a node of its own."""
    if own_node:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    sweeping.SWEPT_TOKENS = (TILE_TOKENS,)  # so that short sequences have tiles enough
    return memo.Trainer(config=run(**{"offload_granularity": "auto", **overrides}))


def chosen(caps: list[float], own_nodes: bool = False, **overrides: Any) -> tuple[Sweep, str, float]:
    """What was chosen on this rank, the line of the header about it, and the loss of a step."""
    header = io.StringIO()
    with trainer(own_nodes, device_memory_gib=caps[dist.get_rank() % len(caps)], **overrides) as made:
        with contextlib.redirect_stdout(header):
            made.print_header()
        said = [line for line in header.getvalue().splitlines() if line.startswith("layers:")]
        return sweep_of(made.config), "".join(said), made.step().lm_loss


@pytest.mark.parametrize(
    ("cap_gib", "expected", "says"),
    [
        (cap_of(WHOLE), WHOLE, "layers: whole (--offload-granularity auto chose --offload-granularity layer)"),
        (
            cap_of(SWEPT),
            SWEPT,
            f"layers: swept in {TILES} tiles (--offload-granularity auto chose --offload-granularity tile "
            f"--offload-tiles {TILES} --offload-slot-tiles 4)",
        ),
        (
            cap_of(HIDDEN),
            HIDDEN,
            f"layers: swept in {TILES} tiles, hidden states in host memory (--offload-granularity auto chose "
            f"--offload-granularity tile --offload-tiles {TILES} --offload-slot-tiles 4 --offload-hidden-states)",
        ),
    ],
    ids=["whole", "swept", "hidden states"],
)
def test_layers_are_whole_where_they_fit_and_swept_where_they_do_not(
    cap_gib: float, expected: Sweep, says: str
) -> None:
    """The run is the one with the flags that the header names, to the bit."""
    assert cap_of(HIDDEN) < cap_of(SWEPT) / 1.01 < cap_of(SWEPT) < cap_of(WHOLE) / 1.01
    ((found, said, loss),) = run_ranks(1, chosen, [cap_gib])
    assert (found, said) == (expected, says)
    ((_, none, same),) = run_ranks(1, with_flags, cap_gib, expected)
    assert (none, same) == ("", loss)


def with_flags(cap_gib: float, sweep: Sweep) -> tuple[Sweep, str, float]:
    memory = with_sweep(run(), sweep).memory
    names = ("offload_granularity", "offload_tiles", "offload_slot_tiles", "offload_hidden_states")
    return chosen([cap_gib], **{name: getattr(memory, name) for name in names})


def test_where_nothing_fits_it_says_what_comes_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "SWEPT_TOKENS", (TILE_TOKENS,))
    with pytest.raises(ResourceError) as refused:
        memo.Trainer(config=run(offload_granularity="auto", device_memory_gib=0.5 * cap_of(HIDDEN)))
    message = str(refused.value)
    assert "--offload-granularity auto finds no way that fits: with layers whole device memory binds" in message
    assert f"with layers {HIDDEN} device memory binds" in message
    assert "use --offload-states auto, " not in message and "--no-admission" in message


def test_where_layers_cannot_be_swept_it_says_why() -> None:
    with pytest.raises(ResourceError, match="layers cannot be swept: --seq-length 512 has no two slots of 4 equal"):
        memo.Trainer(config=run(offload_granularity="auto", device_memory_gib=cap_of(SWEPT)))


def test_whole_layers_that_are_refused_name_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "SWEPT_TOKENS", (TILE_TOKENS,))
    advice = f"; --offload-granularity auto would start it with layers {SWEPT}"
    with pytest.raises(ResourceError) as refused:
        memo.Trainer(config=run(device_memory_gib=cap_of(SWEPT)))
    assert advice in str(refused.value)
    with pytest.raises(ResourceError) as refused:
        memo.Trainer(config=run(device_memory_gib=0.5 * cap_of(HIDDEN)))
    assert "auto would start" not in str(refused.value)


@pytest.mark.parametrize("own_nodes", [False, True], ids=["one node", "two nodes"])
def test_ranks_agree_before_anything_is_built(own_nodes: bool) -> None:
    """On one node its first rank decides. Of two nodes that decide, the one with less room."""
    much, little = cap_of(WHOLE, 2), cap_of(SWEPT, 2)
    caps = [much, little] if own_nodes else [little, 0.1 * little]
    found = run_ranks(2, chosen, caps, own_nodes)
    assert [sweep for sweep, _, _ in found] == [SWEPT, SWEPT]
    assert found[0][2] == found[1][2]


def save_and_go_on(folder: str, first: float, then: float) -> tuple[Sweep, Sweep, list[float], str]:
    """How layers ran before and after, the losses of both steps, and what was printed."""
    sweeps, losses, printed = [], [], io.StringIO()
    for cap_gib, iters in ((first, 1), (then, 2)):
        values: dict[str, Any] = {"save": folder, "load": folder, "train_iters": iters, "lr_decay_iters": 2}
        with contextlib.redirect_stdout(printed), trainer(device_memory_gib=cap_gib, **values) as made:
            made.callbacks.append(lambda record: losses.append(record.lm_loss))
            made.train()
            sweeps.append(sweep_of(made.config))
    return sweeps[0], sweeps[1], losses, printed.getvalue()


def test_a_run_goes_on_in_its_tiles_where_they_fit(tmp_path: Path) -> None:
    """Even where whole layers would fit by now, so its losses are those of a run whose room did not change."""
    little, much = cap_of(SWEPT), cap_of(WHOLE)
    ((before, after, losses, printed),) = run_ranks(1, save_and_go_on, str(tmp_path / "a"), little, much)
    assert (before, after) == (SWEPT, SWEPT)
    assert "loaded checkpoint" in printed and "rounds differently" not in printed
    saved = read_toml(tmp_path / "a" / "config.toml")
    assert (saved["offload_granularity"], saved["offload_tiles"], saved["offload_slot_tiles"]) == ("tile", TILES, 4)
    ((_, _, same, _),) = run_ranks(1, save_and_go_on, str(tmp_path / "b"), little, little)
    assert losses == same


def test_a_run_that_goes_on_in_other_tiles_says_so(tmp_path: Path) -> None:
    ((before, after, _, printed),) = run_ranks(1, save_and_go_on, str(tmp_path), cap_of(WHOLE), cap_of(SWEPT))
    assert (before, after) == (WHOLE, SWEPT)
    said = f"layers were whole until there and are swept in {TILES} tiles from here on, which rounds differently"
    assert said in printed
