"""The fitted numbers of the memory estimate on GPUs: all of them, here and nowhere else.

Calibrated on tables 3 and 4 of "Accelerating LLM Training with 4D Parallelism and Memory Consumption Estimator": 232
runs of Llama-3.1-8B at 8,192 tokens on A100 (40 GB) and H100 (94 GB) under Megatron-LM, each marked ok or out of
memory. The first three maximise the least distance of any run from its device's limit, then are rounded; all 232 runs
then lie on the right side. Everything else in `memo.estimate.rank_memory` is counted, not fitted.

One table left out: fitted on table 3 alone, of the 85 runs of table 4 one is called "fits" and ran out of memory (4
GPUs, no data parallelism), and one is unsure; fitted on table 4 alone, where no run tells what context parallelism
costs, of the 147 runs of table 3 six are called "fits" and ran out of memory, and six are unsure. The tests repeat
both fits. Nothing here was checked above 94 GiB, above 4 context-parallel ranks, or on runs of memo's own.

One unsure run costs `memo plan` 6 % (A100, 8 GPUs, tp 4: 98.6 % of the usable memory). Accounts that hold the other
231 runs at least as well disagree about it: with one more number for the loss, the optimizer's group, nodes, gradients
or layers they put it at 97.8 to 101.1 %; the two with the largest distances (layers, gradients) at 101.1 and 98.8 %.
"""

CONTEXT_GIB = 0.4
"""CUDA context, libraries and communicators of a GPU beyond what USABLE_SHARE leaves out."""

CP_GIB = 1.5
"""For each doubling of the context-parallel ranks: communicators, ring buffers, pools of a second stream."""

STEP_BYTES = 2.8
"""For each parameter of a rank's optimizer shard: reduced gradients, and holes left by states made late."""

USABLE_SHARE = 0.985
"""Of the nominal memory, what torch reports as the device's: 39.4 of 40 GiB on A100."""

FITS_SHARE = 0.98
"""Up to this share of the usable memory a run fits; holes between tensors only ever add."""

OOM_SHARE = 1.005
"""Above this share it does not; between the two the verdict is unsure."""
