"""Compares ways to train models whose states exceed the device: memo's placements, PyTorch's and DeepSpeed's offload.

    python benchmarks/offload_states.py

Every way trains the same shape on one device, with fp32 masters and moments, on one sequence a step. memo's ways differ
only in --offload-states. FSDP2 keeps weights, gradients and AdamW's states on the host (benchmarks/fsdp2.py), and so
does ZeRO-Offload (ZeRO-3 with both offloads) if DeepSpeed is installed. A model that fits neither on the device nor on
the host is trained only with a plan that divides its states. `reach` rows have the longest sequence with the
optimizer's states on the host.
"""

import dataclasses
import importlib.util
import json
import sys
from typing import Any

import torch
from fsdp2 import Gpt, PlainGpt, fsdp2_offload, train_steps
from measure import case_of, in_fresh_process, measured
from peers import gpt_of
from reach import longest
from rows import Journal
from scales import Arguments, Shape, parser, resolve

WAYS = ("states-resident", "states-optimizer", "states-all", "states-auto")
PEERS = {"fsdp2-cpu-offload": None, "deepspeed-zero-offload": "deepspeed"}
"""Peers by name, with the package that each needs."""


def zero_offload(gpt: Gpt) -> dict[str, Any]:
    """Train by DeepSpeed's ZeRO-3 with parameters and optimizer on the host, on one rank."""
    import deepspeed

    torch.manual_seed(gpt.seed)
    is_cuda = gpt.device == "cuda"
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": is_cuda},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": is_cuda},
            "offload_optimizer": {"device": "cpu", "pin_memory": is_cuda},
        },
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = PlainGpt(gpt)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        return loss

    return train_steps(gpt, step)


def take(name: str, gpt: Gpt) -> dict[str, Any]:
    """Measure a peer; called in a fresh process."""
    return zero_offload(gpt) if name == "deepspeed-zero-offload" else fsdp2_offload(gpt)


def compare(args: Arguments, journal: Journal, name: str, shape: Shape, ways: tuple[str, ...]) -> None:
    """Train one model by memo's placements, and by peers if these can hold it."""
    cases = {way: case_of(args, way, shape, args.scale.streamed_length) for way in ways}
    ours = [journal.add({**measured(args, case), "kind": "compare", "model": name}) for case in cases.values()]
    best = min((row["step_p50_s"] for row in ours if row["status"] == "ok"), default=None)
    if len(ways) == 1:
        return
    about = {key: ours[0][key] for key in ("scale", "model", "shape", "layers", "seq_length", "kind")}
    gpt = gpt_of(cases[ways[0]])
    for peer, package in PEERS.items():
        if package is not None and importlib.util.find_spec(package) is None:
            row: dict[str, Any] = {"status": "unavailable", "message": f"not installed: {package}"}
        else:
            command = [sys.executable, __file__, "--one", peer, json.dumps(dataclasses.asdict(gpt))]
            row = in_fresh_process(command, min(args.scale.timeout_s, args.left_s))
        kept = journal.add({**about, "way": peer, **row})
        if kept["status"] == "ok" and best is not None:
            journal.amend(kept, memo_speed_over_it=kept["step_p50_s"] / best)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--one", nargs=2, metavar=("PEER", "GPT"), help="measure one peer here; print its row")
    given = flags.parse_args()
    if given.one:
        print(json.dumps(take(given.one[0], Gpt(**json.loads(given.one[1])))))
        return
    args = resolve(given)
    journal = Journal(f"{args.scale.name}/offload_states")
    for name, shape in args.scale.streamed.items():
        compare(args, journal, name, shape, WAYS)
    for name, shape in args.scale.only_planned.items():
        compare(args, journal, name, shape, ("states-auto",))
    for name, shape in args.scale.streamed.items():
        longest(args, journal, name, shape, "states-optimizer")


if __name__ == "__main__":
    main()
