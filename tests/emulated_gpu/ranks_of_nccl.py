"""What one rank does in test_collectives.py: python ranks_of_nccl.py SCENARIO RANK SIZE FILE."""

import sys

import torch
import torch.distributed as dist

from memo.emulated_gpu.face import EmulatedGpu


def collectives(rank: int, size: int) -> None:
    """Each collective against what its definition says; work on it is queued before and after, on the same stream."""
    mine = torch.arange(4.0, device="cuda") + rank
    total = mine * 1
    dist.all_reduce(total)
    ranks = size * (size - 1) / 2
    assert torch.equal(total.cpu(), torch.arange(4.0) * size + ranks)
    whole = torch.empty(4 * size, device="cuda")
    dist.all_gather_into_tensor(whole, mine)
    assert torch.equal(whole.cpu().view(size, 4), torch.stack([torch.arange(4.0) + r for r in range(size)]))
    part = torch.empty(4, device="cuda")
    dist.reduce_scatter_tensor(part, whole)
    assert torch.equal(part.cpu(), size * (torch.arange(4.0) + rank))
    others = torch.empty(2 * size, device="cuda")
    dist.all_to_all_single(others, torch.arange(2.0 * size, device="cuda") + 100 * rank)
    sent = [[2.0 * rank + 100 * r, 2.0 * rank + 1 + 100 * r] for r in range(size)]
    assert torch.equal(others.cpu().view(size, 2), torch.tensor(sent))
    root = torch.full((3,), float(rank), device="cuda", dtype=torch.bfloat16)
    dist.broadcast(root, 1)
    assert root.tolist() == [1.0] * 3
    large = torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(large, dist.ReduceOp.MAX)
    assert large.item() == size - 1
    split = dist.new_group([r for r in range(size) if r % 2 == rank % 2], use_local_synchronization=True)
    number = torch.ones(1, device="cuda")
    dist.all_reduce(number, group=split)
    assert number.item() == (size + 1 - rank % 2) // 2


def messages(rank: int, size: int) -> None:
    """A ring of sends and receives in one batch, then one after the other."""
    after, before = (rank + 1) % size, (rank - 1) % size
    out, into = torch.full((5,), float(rank), device="cuda"), torch.empty(5, device="cuda")
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)]):
        work.wait()
    assert into.tolist() == [float(before)] * 5
    for turn in range(3):
        if rank == 0:
            dist.send(out + turn, 1)
        elif rank == 1:
            dist.recv(into, 0)
            assert into.tolist() == [float(turn)] * 5


def questions(rank: int, size: int) -> None:
    """Whether a message has come is asked often, while it cannot have: it answers what is sent afterwards."""
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    out, into = torch.full((5,), float(rank), device="cuda"), torch.empty(5, device="cuda")
    if rank == 0:
        answer = dist.irecv(into, 1, group=one)
        assert answer is not None and not any(answer.is_completed() for _ in range(500))
        dist.send(out, 1, group=other)
        answer.wait()
    else:
        dist.recv(into, 0, group=other)
        dist.send(out, 0, group=one)
    assert into.tolist() == [1.0 - rank] * 5


def unordered(rank: int, size: int) -> None:
    """A collective that is read without a wait is a race like any other."""
    gpu = EmulatedGpu()
    total = torch.ones(4, device="cuda")
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    total.sum()
    torch.cuda.synchronize()
    assert not gpu.races()
    work = dist.all_reduce(total, async_op=True)
    total.sum()
    work.wait()
    torch.cuda.synchronize()
    assert any("ncclAllReduce" in text for text in gpu.races()), gpu.races()


def disagreement(rank: int, size: int) -> None:
    """Counts that differ between ranks end the process's device with a message."""
    dist.all_reduce(torch.ones(4 + rank, device="cuda"))
    torch.cuda.synchronize()


def order_of_collectives(rank: int, size: int) -> None:
    """Two collectives of one communicator, which the ranks call in another order."""
    (reduce_first if rank == 0 else gather_first)(torch.ones(4, device="cuda"), torch.empty(4 * size, device="cuda"))
    torch.cuda.synchronize()


def reduce_first(part: torch.Tensor, whole: torch.Tensor) -> None:
    dist.all_reduce(part)
    dist.all_gather_into_tensor(whole, part)


def gather_first(part: torch.Tensor, whole: torch.Tensor) -> None:
    dist.all_gather_into_tensor(whole, part)
    dist.all_reduce(part)


def order_of_messages(rank: int, size: int) -> None:
    """The message waits for its receiver, and the receiver waits for a collective behind the message."""
    (send_first if rank == 0 else receive_last)(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()


def send_first(tensor: torch.Tensor) -> None:
    dist.send(tensor, 1)
    dist.all_reduce(tensor)


def receive_last(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    dist.recv(tensor, 0)


if __name__ == "__main__":
    scenario, rank, size, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=size, device_id=device)
    globals()[scenario](rank, size)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    print("done")
