"""What gloo asks torch's allocator for, beside the tensors that it is given (torch 2.13).

    all_gather       a copy of the whole result, twice, one after the other
    reduce_scatter   a copy of the whole input, until the message is waited for and dropped
    all_to_all, all_reduce, send, receive   nothing

NCCL asks for none of this.
"""

from memo.estimate.program.ledger import Block, Ledger


def all_gather(ledger: Ledger, size: int, name: str, num_bytes: int, own: Block | None = None) -> Block | None:
    """The gathered tensor, `num_bytes` over all ranks; `own`, what each gives, where there is one rank.

    That is: what to free once it is used. None where the caller's own tensor stands for it.
    """
    if size == 1:
        return own
    out = ledger.make(name, num_bytes)
    ledger.pulse(("gloo", num_bytes))
    return out


def reduce_scatter(ledger: Ledger, size: int, name: str, whole: Block) -> tuple[Block, Block | None]:
    """(this rank's part, gloo's copy); where there is one rank the part is `whole`, else `whole` is still there."""
    if size == 1:
        return whole, None
    part = ledger.make(name, whole.num_bytes // size)
    return part, ledger.make("gloo", whole.num_bytes)
