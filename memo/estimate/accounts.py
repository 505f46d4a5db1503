"""One interface to the two memory accounts: the account of memo itself, and the account of Megatron-LM.

memo          memo.estimate.memory_account     every request is counted, nothing is fitted
megatron-lm   memo.estimate.rank_memory    a few terms are fitted to published runs (memo.estimate.calibration)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from memo.config import RunConfig
from memo.estimate.memory_account import own_memories, worst_stages
from memo.estimate.rank_memory import WHOLE_LOGIT_BYTES, RankMemory, worst_rank
from memo.estimate.unseen_memory import FAST_NODE, NOTHING, Links, Unseen, unseen_memory
from memo.estimate.verdict import Program
from memo.spec.shapes import ModelShape
from memo.spec.slots import Moved


@dataclass(frozen=True)
class Account:
    """Memory of runs of one model with --device cuda.

    Attributes:
        program: the program that runs.
        shape: the model whose parameters are counted for Megatron-LM; for memo the configuration has them.
        logit_bytes: bytes of one logit if Megatron-LM's loss keeps the logits of all tokens at once, else None; memo's
            loss never keeps them all.
        links: links between GPUs; they decide how much memory NCCL takes in memo's runs.
    """

    program: Program
    shape: ModelShape
    world_size: int
    logit_bytes: int | None = WHOLE_LOGIT_BYTES
    links: Links = FAST_NODE

    def stages(self, config: RunConfig, moved: Moved | None = None) -> Mapping[int, RankMemory]:
        """Return by stage the memory of the rank that needs most, for the stages that may need most.

        For Megatron-LM the result has the worst stage alone, under the key 0.

        `moved` is what a swap plan moves; by default it is what a number in --offload-alpha moves.
        """
        if self.program == "memo":
            return _own(config, self.world_size, _key(moved), self.links)
        shape, logit_bytes = self.shape, self.logit_bytes
        return {0: worst_rank(config, shape, self.world_size, logit_bytes=logit_bytes, moved=moved)}

    def worst(self, config: RunConfig, moved: Moved | None = None) -> RankMemory:
        """Memory of the rank that needs most, over all stages."""
        return max(self.stages(config, moved).values(), key=lambda rank: rank.total)

    def unseen(self, config: RunConfig, rank: RankMemory) -> Unseen:
        """Return the memory of a memo rank that torch does not see, with its range.

        It is NOTHING for Megatron-LM, whose account includes this memory in its fitted terms.
        """
        if self.program != "memo":
            return NOTHING
        return unseen_memory(config, self.world_size, self.links, rank.host)


_Key = float | frozenset[tuple[str, int]] | None


def _key(moved: Moved | None) -> _Key:
    """Return a hashable form of `moved`; groups without moved tiles do not change it."""
    if isinstance(moved, Mapping):
        return frozenset((name, tiles) for name, tiles in moved.items() if tiles)
    return moved


def _moved(key: _Key) -> Moved | None:
    return dict(key) if isinstance(key, frozenset) else key


# Cached, because a search asks about the same run when it plans what moves, when it ranks, and when it prints.


@lru_cache(maxsize=1024)
def _own(config: RunConfig, world_size: int, moved: _Key, links: Links) -> dict[int, RankMemory]:
    return own_memories(config, world_size, worst_stages(config), moved=_moved(moved), links=links)
