"""Requests of gloo to torch's allocator, in addition to the tensors that it is given (torch 2.13).

    all_gather       a copy of the whole result, twice, one after the other, until the last rank has sent its part
    reduce_scatter   a copy of the whole input, until the caller has waited for the message and dropped it; gloo's own
                     thread drops it last, so it may outlive the wait until the caller's next request
    all_to_all, all_reduce, send, receive   nothing

NCCL requests none of this.
"""

from memo.estimate.program.ledger import Block, Ledger


def all_gather(ledger: Ledger, size: int, name: str, num_bytes: int, own: Block | None = None) -> Block | None:
    """Return the gathered tensor, of `num_bytes` over all `size` ranks; with one rank, `own`. The caller frees it."""
    out, copy = all_gather_async(ledger, size, name, num_bytes, own)
    ledger.free(copy)
    return out


def all_gather_async(
    ledger: Ledger, size: int, name: str, num_bytes: int, own: Block | None = None
) -> tuple[Block | None, Block | None]:
    """Return the gathered tensor of `all_gather`, and gloo's copy.

    Other ranks may be late, so the copy may live until the caller waits for the message."""
    if size == 1:
        return own, None
    return ledger.make(name, num_bytes), ledger.make("gloo", num_bytes)


def reduce_scatter(ledger: Ledger, size: int, name: str, whole: Block) -> tuple[Block, Block | None]:
    """Return (this rank's part, gloo's copy). With one rank the part is `whole`; else the caller also frees `whole`."""
    if size == 1:
        return whole, None
    part = ledger.make(name, whole.num_bytes // size)
    return part, ledger.make("gloo", whole.num_bytes)


def scattered(ledger: Ledger, size: int, name: str, whole: Block) -> Block:
    """Return this rank's part once the message has ended, and free `whole`. With one rank the part is `whole`."""
    part, copy = reduce_scatter(ledger, size, name, whole)
    if part is not whole:
        ledger.free(whole)
        ledger.free_late(copy)
    return part
