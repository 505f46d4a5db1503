"""Equation 18 of "Accelerating LLM Training with 4D Parallelism and Memory Consumption Estimator", as its tables
compute it.

    d = gpus / (t c p)
    layer(t) = 2 h^2 ((1 + k/a + 3/2 f/h) / t + 1/h)
    params   = (L/p) layer(t) + h v / t              p > 1: the first stage (eq. 10)
             =  L    layer(t) + 2 h v / t + h        p = 1: both embeddings and the last norm (eq. 6)
    states   = (6 + 12 / (d c)) params               bytes: bf16 weights, fp32 gradients, sharded fp32 Adam
    act      = s b h / (t c) [(12 + 4 k/a + 8 f/h) L + 8 p + (4 (1 + v/h) if p = 1)]        (eq. 17)

h hidden, a heads, k key/value heads, f MLP, v vocabulary without padding, L layers, s sequence, b micro-batch,
t tp, c cp, p pp. Every cell of the paper's table 2 comes out within 0.005 GiB ("GB" there is 2^30).

Known errors: it is written for Llama (gated MLP, untied head) but applied unchanged to any shape. It does not count the
cost of context parallelism (estimates are equal, but a larger c runs out first), the transient logits at p = 1 (two
more copies), temporary buffers and fragmentation. Its 8 s b h p should be 8 s b p of token ids and 2 s b h p of
embeddings, and 8 f/h counts one f too many for a fused SwiGLU.
"""

from typing import NamedTuple

from memo.estimate.verdict import Verdict
from memo.spec.shapes import ModelShape

GREEN_SHARE = 0.8
"""Section 4.1: at most this share of the capacity never ran out of memory."""


class Eq18(NamedTuple):
    """Bytes of one GPU of the first pipeline stage."""

    states_bytes: float
    activation_bytes: float


def eq18(shape: ModelShape, seq_length: int, tp: int, cp: int, pp: int, micro_batch: int, gpus: int) -> Eq18:
    """States and activations of one GPU, in bytes; `gpus` must be a multiple of tp x cp x pp."""
    model, h = shape.nearest, shape.nearest.hidden_size
    kv_share, mlp_share = model.kv_heads / model.num_attention_heads, model.mlp_size / h
    layer = 2 * h * h * ((1 + kv_share + 1.5 * mlp_share) / tp + 1 / h)
    table = h * model.vocabulary / tp
    parameters = model.num_layers / pp * layer + (table if pp > 1 else 2 * table + h)
    dp = gpus // (tp * cp * pp)
    units = (12 + 4 * kv_share + 8 * mlp_share) * model.num_layers + 8 * pp
    if pp == 1:
        units += 4 * (1 + model.vocabulary / h)
    return Eq18((6 + 12 / (dp * cp)) * parameters, seq_length * micro_batch / (tp * cp) * h * units)


def zone(total_bytes: float, capacity_bytes: float) -> Verdict:
    """The colours of the paper's tables: green (fits) up to 80 % of the capacity, red (oom) above all of it, yellow
    (unsure) between."""
    if total_bytes <= GREEN_SHARE * capacity_bytes:
        return Verdict.FITS
    return Verdict.UNSURE if total_bytes <= capacity_bytes else Verdict.OOM
