"""All fitted numbers of Megatron-LM's memory account, which stand nowhere else.

Calibrated on tables 3 and 4 of "Accelerating LLM Training with 4D Parallelism and Memory Consumption Estimator": 232
runs of Llama-3.1-8B at 8,192 tokens on A100 (40 GB) and H100 (94 GB) under Megatron-LM, each marked ok or out of
memory. The first four numbers maximise the smallest distance of any run from its device's limit, under the condition
that all runs of MEMO's table 7 (7B to 65B, 128K to 1,408K tokens, A800) but one are judged to fit. Then they are
rounded. The smallest distance is 0.5 %, and all 232 runs are on the right side; without CONTEXT_SHARE it would be
0.24 %. A CUDA context takes more than CONTEXT_GIB on any GPU; the bytes of the layers, which are counted too high, make
up for the difference.

If some runs are left out of the fit and then judged, no verdict is wrong, whether a layout is left out (7 runs are
unsure), a number of GPUs (9), a micro-batch (8) or a tp (9); without CONTEXT_SHARE 1, 1, 1 and 2 would be wrong. If
only table 3 is fitted, no verdict on the 85 runs of table 4 is wrong and 2 are unsure. If most runs that show the cost
of context parallelism are left out (table 4 alone, or no runs with pp 1), 6 of the others are judged to fit but ran out
of memory. The tests repeat these fits. A third of the runs about which a fit without them is unsure ran out of memory.

Layers and logits have more bytes than Megatron-LM's code keeps. With those of the code, the best fit has runs on the
wrong side of their limit by up to 1.2 % (6 bytes a logit), 2.2 % (SwiGLU as one kernel) and 4.2 % (both).

Tokens are counted, however they are cut into sequences: two sequences of 16K count as four of 8K. With tp 2 and cp 2 on
4 H100 the four of 8K ran out of memory, at 1.145 of the usable memory by these numbers. No term is missing for this: an
account with separate bytes for tokens, logits, tokens under cp, a second node and the chip says 1.06 to 1.18 if it
places all other runs rightly.

Nothing here was checked above 94 GiB, above 4 context-parallel ranks except in MEMO's runs, or on memo's own runs.
"""

CONTEXT_GIB = 0.1
"""CUDA context, libraries and communicators of a GPU, in addition to what USABLE_SHARE leaves out."""

CONTEXT_SHARE = 0.03
"""Share of the gradients' bytes that is added to CONTEXT_GIB: holes that remain after weights were moved into flat
buckets, and whatever else grows with a rank's parameters."""

CP_GIB = 1.47
"""GiB for each doubling of the context-parallel ranks: communicators, ring buffers, pools of a second stream."""

STEP_BYTES = 2.95
"""Bytes for each parameter of a rank's optimizer shard: reduced gradients, and holes left by states made late."""

USABLE_SHARE = 0.985
"""Share of the nominal memory that torch reports: 39.4 of 40 GiB on A100. Read off, not fitted."""

FITS_SHARE = 0.98
"""Up to this share of the usable memory a run is judged to fit; holes between tensors can only add to its bytes."""

OOM_SHARE = 1.003
"""Above this share a run is judged to run out of memory; between the two shares the verdict is unsure."""
