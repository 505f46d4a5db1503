"""The fitted numbers of the memory estimate on GPUs: all of them, here and nowhere else.

Calibrated on tables 3 and 4 of "Accelerating LLM Training with 4D Parallelism and Memory Consumption Estimator": 232
runs of Llama-3.1-8B at 8,192 tokens on A100 (40 GB) and H100 (94 GB) under Megatron-LM, each marked ok or out of
memory. The first four maximise the least distance of any run from its device's limit, given that what MEMO's table 7
(7B to 65B, 128K to 1,408K tokens, A800) ran "fits", but for one row; then they are rounded. The distance is 0.5 %, and
all 232 runs lie on the right side. Without a share of the gradients it would be 0.24 %. A CUDA context takes more than
CONTEXT_GIB on any GPU: the rest is hidden in what the layers' bytes count too much.

Left out and judged by the fit of all others, no run is called wrong, whether what is left out is a layout (7 runs
unsure), a number of GPUs (9), a micro-batch (8) or a tp (9); without a share of the gradients 1, 1, 1 and 2 would be.
Fitted on table 3 alone, of the 85 runs of table 4 none is called wrong and 2 are unsure. Fitted without most runs that
tell what context parallelism costs, on table 4 alone or without pp 1, 6 of the others are called "fits" and ran out of
memory. The tests repeat these fits. Of the runs that a fit without them is unsure about, a third ran out of memory.

Nothing here was checked above 94 GiB, above 4 context-parallel ranks but for MEMO's, or on runs of memo's own.
"""

CONTEXT_GIB = 0.1
"""CUDA context, libraries and communicators of a GPU beyond what USABLE_SHARE leaves out."""

CONTEXT_SHARE = 0.03
"""Of the gradients' bytes, beside it: holes that weights leave behind when they move into flat buckets, and whatever
else grows with a rank's parameters."""

CP_GIB = 1.47
"""For each doubling of the context-parallel ranks: communicators, ring buffers, pools of a second stream."""

STEP_BYTES = 2.95
"""For each parameter of a rank's optimizer shard: reduced gradients, and holes left by states made late."""

USABLE_SHARE = 0.985
"""Of the nominal memory, what torch reports as the device's: 39.4 of 40 GiB on A100. Read off, not fitted."""

FITS_SHARE = 0.98
"""Up to this share of the usable memory a run fits; holes between tensors only ever add."""

OOM_SHARE = 1.003
"""Above this share it does not; between the two the verdict is unsure."""
