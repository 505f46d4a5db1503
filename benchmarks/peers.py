"""Compares memo with alternatives: transformers with gradient checkpointing, on a whole model and one device.

    python benchmarks/peers.py

The peers train the same shape on as many tokens, in transformers' own classes: weights and AdamW states in fp32, bf16
products by autocast on CUDA, and PyTorch's scaled-dot-product attention (memo: bf16 weights, fp32 masters, moments and
gradients). Offload copies the inputs of checkpointed layers into pinned host memory on the compute stream, as TRL,
Unsloth and Arctic Long Sequence Training do.

Further rows are Liger's kernels, and ALST's parts for one device as DeepSpeed ships them
(https://arxiv.org/abs/2506.13996: the MLP and the loss in tiles of the sequence, layer inputs offloaded). If their
packages are missing, the rows say so. FSDP2 with weights and optimizer states on the host trains a GPT of about as many
weights, in plain torch (benchmarks/fsdp2.py).

The model is the largest of the set whose states leave room on one device for activations.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fsdp2 import Gpt, fsdp2_offload
from measure import Case, DeviceMemory, case_of, in_fresh_process, measured, percentiles
from rows import Journal
from scales import parser, resolve
from torch import Tensor
from ways import HostCopies

from memo.config.to_hugging_face import write_config
from memo.train.device import peak_memory_bytes
from memo.train.oom import is_out_of_memory

FSDP2 = "fsdp2-cpu-offload"
PEERS = {
    # name: (packages it needs, inputs of layers wait in host memory)
    "transformers-checkpointing": (("transformers",), False),
    "transformers-checkpointing-offload": (("transformers",), True),
    "transformers-liger-checkpointing": (("transformers", "liger_kernel"), False),
    "transformers-liger-checkpointing-offload": (("transformers", "liger_kernel"), True),
    "transformers-alst-offload": (("transformers", "deepspeed"), True),
    FSDP2: ((), False),
}
_LOGITS_BYTES = 1 << 30
"""Bytes of the fp32 logits of one tile of ALST's loss, as in its trainer."""

Loss = Callable[[Tensor], Tensor]


def build(case: Case, liger: bool) -> torch.nn.Module:
    """Return the case's model in transformers, in training mode with checkpointed layers."""
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


def plain_loss(model: Any) -> Loss:
    """Return the function tokens [1, s] -> mean loss, as transformers computes it."""
    return lambda tokens: model(input_ids=tokens, labels=tokens).loss


def tiled_loss(model: Any, case: Case) -> Loss:
    """Return the function tokens [1, s] -> mean loss with ALST's MLP and loss; changes the model's MLPs.

    A tile of the MLP has as many tokens as the model is wide. ALST's functions recompute outside of autocast, so the
    functions that they get turn autocast on.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

    def autocast() -> torch.autocast:
        return torch.autocast(case.device, torch.bfloat16, enabled=case.device == "cuda")

    def mlp(module: Any, x: Tensor) -> Tensor:
        with autocast():
            return module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))  # type: ignore[no-any-return]

    def tiled(module: Any) -> Callable[[Tensor], Tensor]:
        weights = list(module.parameters())
        return lambda x: TiledMLP.apply(mlp, module, x, math.ceil(x.shape[1] / x.shape[2]), weights)

    for layer in model.model.layers:
        layer.mlp.forward = tiled(layer.mlp)
    count = case.seq_length - 1

    def cross_entropy(head: Any, hidden: Tensor, targets: Tensor) -> Tensor:
        with autocast():
            return torch.nn.functional.cross_entropy(head(hidden).float(), targets, reduction="sum") / count

    def loss(tokens: Tensor) -> Tensor:
        hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
        tiles = math.ceil(count * case.model.vocabulary * 4 / _LOGITS_BYTES)
        head, targets = model.lm_head, tokens[:, 1:]
        return TiledFusedLogitsLoss.apply(  # type: ignore[no-any-return]
            cross_entropy, head, hidden, targets, None, tiles, [head.weight], "sum"
        )

    return loss


@contextlib.contextmanager
def layer_inputs_away(hidden_size: int, copies: HostCopies) -> Iterator[None]:
    """Keep saved tensors of the shape of a layer's input, [1, s, h], in host memory until backward."""

    def pack(x: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if x.dim() != 3 or x.shape[-1] != hidden_size:
            return x
        return x.device, copies.take(x)

    def unpack(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved[1].to(saved[0], non_blocking=True, copy=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def take(name: str, case: Case) -> dict[str, Any]:
    """Warm up, run steps, and return the row; called in a fresh process."""
    (packages, offload), copies = PEERS[name], HostCopies()
    if "num_threads" in case.flags:
        torch.set_num_threads(case.flags["num_threads"])
    if name == FSDP2:
        return fsdp2_offload(gpt_of(case))
    try:
        model = build(case, liger="liger_kernel" in packages)
        loss_of = tiled_loss(model, case) if "deepspeed" in packages else plain_loss(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=case.device == "cuda")
        steps_s: list[float] = []
        for step in range(case.warmup + case.steps):
            if step == case.warmup:
                memory = DeviceMemory.begin(case.device)
            tokens = torch.randint(0, case.model.vocabulary, (1, case.seq_length), device=case.device)
            start_s = time.perf_counter()
            with layer_inputs_away(case.model.hidden_size, copies) if offload else contextlib.nullcontext():
                with torch.autocast(case.device, torch.bfloat16, enabled=case.device == "cuda"):
                    loss = loss_of(tokens)
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


def gpt_of(case: Case) -> Gpt:
    """Return a GPT as wide and as deep as the case's model; its MLP is always four times as wide as the model."""
    model = case.model
    return Gpt(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        vocab_size=model.vocabulary,
        seq_length=case.seq_length,
        device=case.device,
        warmup=case.warmup,
        steps=case.steps,
    )


def missing(packages: tuple[str, ...]) -> list[str]:
    """Return the packages that are not installed."""
    return [package for package in packages if importlib.util.find_spec(package) is None]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS", help="default: those of the scale")
    flags.add_argument("--one", nargs=2, metavar=("PEER", "CASE"), help="measure one case here; print its row")
    given = flags.parse_args()
    if given.one:
        print(json.dumps(take(given.one[0], Case(**json.loads(given.one[1])))))
        return
    args = resolve(given)
    journal = Journal(f"{args.scale.name}/peers")
    out_of_memory: set[str] = set()
    for seq_length in given.lengths or args.scale.peer_lengths:
        case = case_of(args, "memo", args.scale.peer, seq_length)
        ours = journal.add(measured(args, case))
        about = {name: ours[name] for name in ("scale", "model", "shape", "layers", "seq_length")}
        for name, (packages, _) in PEERS.items():
            if missing(packages):
                row = {"status": "unavailable", "message": f"not installed: {', '.join(missing(packages))}"}
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
