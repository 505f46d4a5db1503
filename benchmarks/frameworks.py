"""Other frameworks whose published runs are compared with what memo foresees (memo.simulate.framework)."""

from memo.simulate.framework import Framework

FSDP = Framework(has_unmeasured_host=True)
"""Trainers that shard torch's modules (prime-rl, TRL), on one node only: gathers of weights are not counted."""

MEGATRON_LM = Framework(waits_for_messages=True)
"""Megatron-LM's 1F1B without interleaving: after each forward and each backward a stage sends, receives and waits for
both (megatron/core/pipeline_parallel/p2p_communication.py).

Known error: the simulator places these waits where stages wait for each other least (memo.spec.rendezvous).
"""
