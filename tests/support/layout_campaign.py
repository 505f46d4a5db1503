"""Random models in random layouts, with random places for what they keep, against one plain process in fp64: status 1
after one difference.

    python tests/support/layout_campaign.py --seeds 200 [--first 0]

A seed draws configurations until memo accepts one. Two steps of it must have the losses, the gradients and the gradient
norms of two steps of the same model on one process that keeps all on the device. `make test-full` tries a few seeds.
"""

import argparse
import random
import sys
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from layouts import relative_error, tiny, train
from ranks import RankError

from memo.config import PRESETS
from memo.config.checks import check
from memo.errors import ConfigError

STEPS = 2
LOSS_BOUND, GRADIENT_BOUND, NORM_BOUND = 1e-11, 1e-10, 1e-7
"""Relative, in fp64. The second norm is that of weights after a step of AdamW, which magnifies rounding."""
MODELS = [name for name in PRESETS if name.endswith("-tiny")]
CHANGES: list[dict[str, Any]] = [
    {"window_size": 9},
    {"window_size": 9, "layer_types": "full,sliding"},
    {"window_size": 20, "layer_types": "sliding,full", "sliding_rotary_base": 100.0},
    {"layer_types": "linear,full", "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    {"attention_sinks": True},
    {"attn_logit_softcapping": 0.5},
    {"final_logit_softcapping": 0.3},
    {"attention_output_gate": True},
    {"no_rope_freq": "[0,1]*2"},
    {"rotary_percent": 0.5},
    {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_original_max_position_embeddings": 16},
    {"norm_placement": "around"},
    {"norm_placement": "after"},
    {"qk_layernorm": True},
    {"add_bias_linear": True},
    {"add_qkv_bias": True},
    {"activation": "gelu"},
    {"activation": "geglu_tanh"},
    {"apply_layernorm_1p": True},
    {"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 16},
    {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True},
    {"moe_layer_freq": "[0]+[1]*3"},
    {"moe_aux_loss_coeff": 0.1},
    {"lora_rank": 3},
    {"lora_rank": 3, "train_only": "*norm*"},
    {"freeze": "*embedding.weight,layers.[02].*"},
    {"train_only": "layers.[13].*"},
    {"scale_embeddings": True},
    {"untie_embeddings_and_output_weights": True},
    {"num_query_groups": 4},
    {"q_lora_rank": None},
    {"clip_grad": 0.0},
]


class Drawn(NamedTuple):
    """A model, what it shares with the plain run, and its layout and memory."""

    model: str
    world_size: int
    shared: dict[str, Any]
    own: dict[str, Any]


def drawn(seed: int) -> Drawn:
    """The first configuration of a seed that memo accepts."""
    for attempt in count():
        found = _draw(random.Random(f"{seed} {attempt}"))
        try:
            check(tiny(found.model, **found.shared), 1)
            check(tiny(found.model, **found.shared, **found.own), found.world_size)
        except ConfigError:
            continue
        return found
    raise AssertionError


def _draw(dice: random.Random) -> Drawn:
    shared: dict[str, Any] = {"num_layers": 4, "global_batch_size": 4}
    for change in dice.sample(CHANGES, dice.choice([0, 1, 2, 2, 3])):
        shared |= change
    world_size = dice.choice([1, 2, 2, 4])
    return Drawn(
        dice.choice(MODELS), world_size, shared, _layout(dice, world_size) | _activations(dice) | _states(dice)
    )


def _layout(dice: random.Random, world_size: int) -> dict[str, Any]:
    layout: dict[str, Any] = {"micro_batch_size": dice.choice([1, 1, 2]), "overlap_grad_reduce": dice.random() < 0.8}
    layout["data_parallel_sharding_strategy"] = dice.choice(["optim", "optim", "optim_grads", "optim_grads_params"])
    if dice.random() < 0.25:
        layout["gradient_accumulation_order"] = "breadth_first"
    for axis in dice.sample(["tp", "cp", "pp"], 3):
        if world_size > 1 and dice.random() < 0.6:
            layout[axis] = dice.choice([2, world_size])
            world_size //= layout[axis]
    if "cp" in layout:
        layout["cp_comm_type"] = dice.choice(["p2p", "all_gather", "a2a", "a2a+p2p"])
    if "pp" in layout and dice.random() < 0.4:
        layout["vpp"] = 2
    return layout


def _activations(dice: random.Random) -> dict[str, Any]:
    way = dice.choice(["keep", "recompute", "layer", "tile", "tile"])
    if way == "keep":
        return {}
    if way == "recompute":
        return {"recompute_granularity": dice.choice(["full", "selective"])}
    moved: dict[str, Any] = {"offload_alpha": dice.choice([0.0, 0.25, 0.5, 1.0, "auto"])}
    moved |= {"offload_tiles": dice.choice([2, 4]), "offload_policy": dice.choice(["auto", "auto", "paper"])}
    if way == "tile":
        moved |= {"offload_granularity": "tile", "offload_slot_tiles": dice.choice([1, 2])}
        moved |= {"recompute_attention_layers": dice.choice([0, 0, 1]), "offload_hidden_states": dice.random() < 0.4}
    return moved


def _states(dice: random.Random) -> dict[str, Any]:
    where = dice.choice(["none", "none", "optimizer", "all", "all"])
    share = dice.choice([0.25, 0.5, 0.75])
    if where == "none" or dice.random() < 0.6:
        return {"offload_states": where}
    shares = {"optimizer_offload_fraction": share}
    if where == "all":
        shares |= {"gradient_offload_fraction": dice.choice([0.0, share])}
        shares |= {"weight_offload_fraction": dice.choice([0.0, share])}
    return {"offload_states": where, **shares}


def fault_of(found: Drawn) -> str:
    """What differs from the plain run, or how the run ended; empty if nothing does."""
    expected = train(tiny(found.model, **found.shared), 1, STEPS)
    try:
        actual = train(tiny(found.model, **found.shared, **found.own), found.world_size, STEPS)
    except RankError as error:
        return str(error)[-2000:]

    def worst(ours: list[float], theirs: list[float]) -> float:
        return max(abs(our - their) / max(abs(their), 1e-30) for our, their in zip(ours, theirs, strict=True))

    errors = {
        "losses": (worst(actual.losses, expected.losses), LOSS_BOUND),
        "gradients": (relative_error(actual.gradients, expected.gradients), GRADIENT_BOUND),
        "norms": (worst(actual.norms, expected.norms), NORM_BOUND),
    }
    return ", ".join(f"{name} differ by {error:.1e}" for name, (error, bound) in errors.items() if not error <= bound)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="configurations to try; default: 100")
    parser.add_argument("--first", type=int, default=0, help="the first seed; default: 0")
    options = parser.parse_args()
    num_faults = 0
    for seed in range(options.first, options.first + options.seeds):
        found = drawn(seed)
        fault = fault_of(found)
        if fault:
            num_faults += 1
            print(f"seed {seed}, {found}: {fault}", flush=True)
    print(f"{options.seeds} configurations, {num_faults} faults")
    return min(num_faults, 1)


if __name__ == "__main__":
    sys.exit(main())
