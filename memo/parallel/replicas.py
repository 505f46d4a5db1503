"""Checks that ranks which should hold equal weights hold equal bits.

    compared over   what
    dp x cp         the weights that each rank gathered after the last update
    tp              norms, and biases added after the sum over tp: weights and masters, updated by each tp rank
    embedding       a tied embedding, on the first and the last pipeline stage

A bit that flips in memory or on the network changes one copy, and no other check reports it. Layers whose weights exist
only in slots have no copies on the ranks of dp x cp, so they are not compared over dp x cp.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from memo.errors import ReplicaError
from memo.mesh.group import torch_group
from memo.mesh.objects import of_all_ranks
from memo.parallel.collectives import all_gather, all_reduce, group_rank, group_size
from memo.parallel.data import ShardedDataParallel

_CHUNK = 1 << 20
"""Words that are hashed at a time, which takes 16 MiB of temporary memory."""
_MIXER = -7046029254386353131
"""2^64 divided by the golden ratio, as a signed number; odd."""
_FOLD = 6364136223846793005
"""Knuth's multiplier for 64 bits; odd."""


def check_replicas(data_parallel: ShardedDataParallel, iteration: int) -> None:
    """Compare all copies of the weights. Collective over all ranks; waits for the device.

    Raises ReplicaError on every rank if copies differ, with the names of the tensors and the ranks.
    """
    mesh, found = data_parallel.mesh, list[str]()
    if mesh.world is None or mesh.is_alone:
        return
    for group in (mesh.dp_cp, mesh.tp, mesh.embedding):
        if group is not None and group_size(group) > 1:
            found += _differences(dict(_copies(data_parallel, group)), group)
    if all_reduce(torch.tensor(float(len(found)), device=data_parallel.device), mesh.world) == 0:
        return
    reported = sorted({text for texts in of_all_ranks(found, mesh.world) for text in texts})
    more = f", and {len(reported) - 3} more" if len(reported) > 3 else ""
    raise ReplicaError(
        f"copies of the weights differ at iteration {iteration}: {'; '.join(reported[:3])}{more}. Memory or network of "
        "a rank named here has changed bits: this state is not saved; go on from the last checkpoint with --load, and "
        "without that machine"
    )


def fingerprint(values: Tensor) -> Tensor:
    """A hash of the bytes of a flat tensor, as an int64 scalar on its device.

    It is the sum, modulo 2^64, of each word times an odd number that depends on the word's index. Integer sums do not
    depend on their order, and a change of one word always changes the hash.
    """
    words = values.view(torch.int16 if values.element_size() == 2 else torch.int32)  # much narrower than the sum
    places = torch.arange(min(_CHUNK, words.numel()), dtype=torch.int64, device=values.device)
    factors = (2 * places + 1) * _MIXER
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for chunk in words.split(_CHUNK):
        total = total * _FOLD + (chunk.long() * factors[: chunk.numel()]).sum()
    return total


def _copies(data_parallel: ShardedDataParallel, group: ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of everything of which each rank of the group should hold an equal copy."""
    mesh = data_parallel.mesh
    for bucket in data_parallel.buckets:
        replica_group = {"tp": mesh.tp, "embedding": mesh.embedding}.get(bucket.plan.replicated)
        if group not in (mesh.dp_cp, replica_group):
            continue
        if bucket.weights is not None:
            for span in bucket.plan.ranges:
                yield _name(data_parallel, span.name), bucket.weights[span.offset : span.offset + span.numel]
        if group is replica_group:
            for part in bucket.plan.segments(group_rank(data_parallel.group)):
                values = bucket.master[part.shard_offset : part.shard_offset + part.stop - part.start]
                yield f"master of {_name(data_parallel, part.range.name)}", values


def _name(data_parallel: ShardedDataParallel, local: str) -> str:
    return ", ".join(piece.name for piece in data_parallel.parameters[local].shard.pieces)


def _differences(copies: dict[str, Tensor], group: ProcessGroup) -> list[str]:
    """One sentence for each tensor that differs between ranks of the group."""
    if not copies:
        return []
    device = next(iter(copies.values())).device
    mine = torch.stack([fingerprint(values).to(device) for values in copies.values()])
    hashes = all_gather(mine.unsqueeze(0), group)
    if bool((hashes == hashes[0]).all()):
        return []
    ranks = dist.get_process_group_ranks(torch_group(group))
    return [
        _sentence(name, dict(zip(ranks, column, strict=True)))
        for name, column in zip(copies, hashes.T.tolist(), strict=True)
        if len(set(column)) > 1
    ]


def _sentence(name: str, hash_of: dict[int, int]) -> str:
    """Names the ranks that differ from the majority, or all ranks if there is no majority."""
    values = list(hash_of.values())
    common = max(set(values), key=values.count)
    if 2 * values.count(common) > len(values):
        odd = [str(rank) for rank, value in hash_of.items() if value != common]
        return f"{name} of rank {', '.join(odd)} is not that of ranks {', '.join(str(r) for r in hash_of)}"
    return f"{name} differs between ranks {', '.join(str(rank) for rank in hash_of)}"
