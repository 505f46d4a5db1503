"""memo beside what a user would pick instead: transformers with gradient checkpointing, whole model, one device.

    python benchmarks/peers.py

The peers train the same shape on as many tokens, in transformers' own classes: weights and AdamW states in fp32, bf16
products by autocast where there is CUDA (memo: bf16 weights, fp32 masters, moments and gradients), PyTorch's
scaled-dot-product attention. Liger's kernels are a row where the package is installed, and a row that says so where
not. Offload puts the inputs of checkpointed layers into pinned host memory, as TRL and Unsloth do.

The model is the largest of the set whose states leave room on one device for activations.
"""

import contextlib
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from measure import Case, DeviceMemory, case_of, in_fresh_process, measured, percentiles
from rows import Journal
from scales import parser, resolve
from torch import Tensor
from ways import HostCopies

from memo.config.to_hugging_face import write_config
from memo.train.device import peak_memory_bytes
from memo.train.oom import is_out_of_memory

PEERS = {
    # name: (package it needs beside transformers, inputs of layers wait in host memory)
    "transformers-checkpointing": (None, False),
    "transformers-checkpointing-offload": (None, True),
    "transformers-liger-checkpointing": ("liger_kernel", False),
    "transformers-liger-checkpointing-offload": ("liger_kernel", True),
}


def build(case: Case, liger: bool) -> torch.nn.Module:
    """The case's model in transformers, in training mode with checkpointed layers."""
    import transformers

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(rope=True, swiglu=True, rms_norm=True, fused_linear_cross_entropy=True)
    content = write_config(case.model, case.seq_length, None).content
    kind = content["model_type"]
    fields = {name: value for name, value in content.items() if name not in ("model_type", "architectures")}
    config: Any = transformers.AutoConfig.for_model(kind, **fields)
    config.use_cache = False
    with torch.device(case.device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    # Reentrant checkpoints save their input as autograd saves tensors, so that it can be moved.
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    return model  # type: ignore[no-any-return]


@contextlib.contextmanager
def layer_inputs_away(hidden_size: int, copies: HostCopies) -> Iterator[None]:
    """What is saved in the shape of a layer's input, [1, s, h], goes to host memory until backward."""

    def pack(x: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if x.dim() != 3 or x.shape[-1] != hidden_size:
            return x
        return x.device, copies.take(x)

    def unpack(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved[1].to(saved[0], non_blocking=True, copy=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def take(name: str, case: Case) -> dict[str, Any]:
    """In a fresh process: warm up, step, and tell."""
    (package, offload), copies = PEERS[name], HostCopies()
    if "num_threads" in case.flags:
        torch.set_num_threads(case.flags["num_threads"])
    try:
        model = build(case, liger=package is not None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=case.device == "cuda")
        steps_s: list[float] = []
        for step in range(case.warmup + case.steps):
            if step == case.warmup:
                memory = DeviceMemory.begin(case.device)
            tokens = torch.randint(0, case.model.vocabulary, (1, case.seq_length), device=case.device)
            start_s = time.perf_counter()
            with layer_inputs_away(case.model.hidden_size, copies) if offload else contextlib.nullcontext():
                with torch.autocast(case.device, torch.bfloat16, enabled=case.device == "cuda"):
                    loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss_value = loss.item()  # waits for the device
            if case.device == "cuda":
                torch.cuda.synchronize()
            steps_s.append(time.perf_counter() - start_s)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "oom", "message": str(error).splitlines()[0]}
    timed = percentiles(steps_s[case.warmup :])
    _, host_peak_bytes = peak_memory_bytes(torch.device(case.device))
    return {
        "status": "ok",
        **timed,
        "tgs": case.seq_length / timed["step_p50_s"],
        **memory.end(case.steps),
        "host_peak_bytes": host_peak_bytes,
        "host_records_bytes": copies.peak_bytes,
        "last_loss": loss_value,
    }


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--one", nargs=2, metavar=("PEER", "CASE"), help="measure one case here; print its row")
    given = flags.parse_args()
    if given.one:
        print(json.dumps(take(given.one[0], Case(**json.loads(given.one[1])))))
        return
    args = resolve(given)
    journal = Journal(f"{args.scale.name}/peers")
    out_of_memory: set[str] = set()
    for seq_length in args.scale.peer_lengths:
        case = case_of(args, "memo", args.scale.peer, seq_length)
        ours = journal.add(measured(args, case))
        about = {name: ours[name] for name in ("scale", "model", "shape", "layers", "seq_length")}
        for name, (package, _) in PEERS.items():
            if package is not None and importlib.util.find_spec(package) is None:
                row = {"status": "unavailable", "message": f"the package {package} is not installed"}
            elif name in out_of_memory:
                row = {"status": "oom", "message": "a shorter sequence was out of memory already"}
            else:
                command = [sys.executable, __file__, "--one", name, json.dumps(dataclasses.asdict(case))]
                row = in_fresh_process(command, min(args.scale.timeout_s, args.left_s))
            if row["status"] == "oom":
                out_of_memory.add(name)
            kept = journal.add({**about, "way": name, **row})
            if kept["status"] == ours["status"] == "ok":
                journal.amend(kept, memo_speed_over_it=kept["step_p50_s"] / ours["step_p50_s"])


if __name__ == "__main__":
    main()
