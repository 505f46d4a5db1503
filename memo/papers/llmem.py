"""LLMem (Kim et al., 2024): peak GPU memory of fine-tuning with Colossal-AI, and the choice of a method.

ceil2(x) rounds up to pages of 2 MiB; e embeddings, l layers, o their output features (h), bs batch of one data-parallel
rank, sl sequence, v vocabulary (sections 4.2 and 5):

    m_p    = ceil2((embed + ceil(other / cs) cs) (2 + 4))     fp16 and fp32 parameters, in chunks of cs
    m_os   = sum over Embedding and Linear of ceil2(8 params) fp32 momentum and variance
    m_out  = ceil2((e + l) bs sl o 2)                         checkpointing: outputs of layers and embeddings
    m_lm   = ceil2(bs sl v B) + 2 ceil2(bs (sl - 1) v B) + 2 lm      logits, shifted logits, head
    m_back = ceil2(l bs sl o (tp - 1) / tp 2)                 buffer of the backward all-gather

    CDP    = m_base + m_p + m_os + m_out + m_lm
    ADP    = m_base + m_p16 + (m_p32 + m_os) / gpus + m_out + m_lm                 (ZeRO-3)
    TP     = m_base + (m_p + m_os) / gpus + m_out + m_lm + m_back(gpus)
    DP+TP  = ADP - m_p16 tp / gpus + m_back(tp)

Known errors. The paper prints errors of up to 1.6 % on one GPU (table 2) and 3 % on several. The literal formula for
ADP accepts OPT-2.7b on four V100s, where table 3 says out of memory. `corrected=True` counts one more fp16 copy for ADP
(+ m_p16) and half a copy for DP+TP (+ m_p16 / 2), which selects every printed row. The paper measures m_base but does
not print it.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from memo.spec.shapes import ModelShape
from memo.units import MIB

PAGE_BYTES = 2 * MIB

CHUNK_PARAMETERS = 32 * MIB
"""cs. Assumed: Colossal-AI searches sizes of this order."""

BASE_BYTES = 850 * MIB
"""m_base. With it both rows of table 2 are met within 8 MiB at whole batches: OPT-125m at 86, bloom-560m at 10."""

LOGIT_BYTES = 2
"""B, of logits in fp16."""


class Method(StrEnum):
    """The methods, in the order that breaks ties."""

    CDP = "CDP"
    ADP = "ADP"
    TP = "TP"
    DP_TP = "DP+TP"


CPU_OFFLOADING = "CPU offloading"


@dataclass(frozen=True)
class Setting:
    """The model that is fine-tuned, and the GPUs.

    Attributes:
        tp: tensor-parallel ranks of DP+TP.
    """

    shape: ModelShape
    seq_length: int
    gpus: int
    tp: int = 2
    corrected: bool = False


@dataclass(frozen=True)
class Terms:
    """The paper's terms for one GPU, in bytes, before any division."""

    base: int
    parameters_fp16: int
    parameters_fp32: int
    optimizer: int
    outputs: int
    head: int


@dataclass(frozen=True)
class Peak:
    """Bytes of one GPU under one method."""

    states_bytes: float
    activation_bytes: float
    base_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.states_bytes + self.activation_bytes + self.base_bytes


@dataclass(frozen=True)
class Selection:
    """Algorithm 1's answer.

    Attributes:
        choice: a Method, or CPU_OFFLOADING if no method fits a batch of 1.
        batch: the largest batch of the choice; 0 for CPU_OFFLOADING.
        batches: the largest batch of each method that this number of GPUs can run.
        scores: the score of each method, by which methods are compared.
    """

    choice: str
    batch: int
    batches: dict[Method, int]
    scores: dict[Method, float]


def terms(setting: Setting, batch: int) -> Terms:
    """m_base, m_p16, m_p32, m_os, m_out and m_lm."""
    shape, tokens = setting.shape, batch * setting.seq_length
    embed = shape.embedding
    other = shape.parameters - shape.embedding - shape.head
    chunked = embed + -(-other // CHUNK_PARAMETERS) * CHUNK_PARAMETERS
    both, fp16 = _pages(6 * chunked), _pages(2 * chunked)
    embeddings = [embed] + [shape.positions * shape.nearest.hidden_size] * (shape.positions > 0)
    operators = [*embeddings, *shape.linears * shape.nearest.num_layers] + [shape.head] * (not shape.tied)
    logits = [batch * setting.seq_length, *[batch * (setting.seq_length - 1)] * 2]
    return Terms(
        base=BASE_BYTES,
        parameters_fp16=fp16,
        parameters_fp32=both - fp16,
        optimizer=sum(_pages(8 * count) for count in operators),
        outputs=_pages((len(embeddings) + shape.nearest.num_layers) * tokens * shape.nearest.hidden_size * 2),
        head=sum(_pages(count * shape.nearest.vocabulary * LOGIT_BYTES) for count in logits)
        + 2 * (shape.head or embed),
    )


def peak(setting: Setting, method: Method, batch: int) -> Peak:
    """Peak memory of one GPU; `batch`: sequences of one data-parallel rank."""
    t = terms(setting, batch)
    gpus, fp16 = setting.gpus, t.parameters_fp16
    all_states = fp16 + t.parameters_fp32 + t.optimizer
    activations: float = t.outputs + t.head
    if method == Method.CDP:
        states: float = all_states
    elif method == Method.TP:
        states = all_states / gpus
        activations += _gather_bytes(setting, batch, gpus)
    elif method == Method.ADP:
        states = fp16 * (2 if setting.corrected else 1) + (t.parameters_fp32 + t.optimizer) / gpus
    else:
        copies = 1 - setting.tp / gpus + (0.5 if setting.corrected else 0)
        states = fp16 * copies + (t.parameters_fp32 + t.optimizer) / gpus
        activations += _gather_bytes(setting, batch, setting.tp)
    return Peak(states, activations, t.base)


def select(setting: Setting, capacity_bytes: float) -> Selection:
    """Algorithm 1: the method whose largest batch that fits has the highest score.

    CPU offloading if all scores are 0, as the text says; line 23 of the printed algorithm tests only TP's score.
    """
    gpus, tp = setting.gpus, setting.tp
    weights: dict[Method, float] = {Method.CDP: 1.5 * gpus, Method.ADP: gpus, Method.TP: 1, Method.DP_TP: gpus / tp}
    batches = {method: _largest_batch(setting, method, capacity_bytes) for method in _methods(setting)}
    scores = {method: batch * weights[method] for method, batch in batches.items()}
    best = max(scores, key=lambda method: scores[method])  # the first method if several are equal
    if not batches[best]:
        return Selection(CPU_OFFLOADING, 0, batches, scores)
    return Selection(best, batches[best], batches, scores)


def _methods(setting: Setting) -> list[Method]:
    """The methods that the GPUs can run: only CDP on one GPU; DP+TP needs several groups of tensor-parallel ranks."""
    if setting.gpus == 1:
        return [Method.CDP]
    has_groups = setting.gpus > setting.tp and setting.gpus % setting.tp == 0
    return [method for method in Method if method != Method.DP_TP or has_groups]


def _largest_batch(setting: Setting, method: Method, capacity_bytes: float) -> int:
    """The largest batch that fits, by doubling and bisection, because the peak grows with the batch."""

    def fits(batch: int) -> bool:
        return peak(setting, method, batch).total_bytes <= capacity_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _gather_bytes(setting: Setting, batch: int, tp: int) -> int:
    """m_back: each layer's outputs from the other tp - 1 ranks."""
    model = setting.shape.nearest
    outputs = 2 * batch * setting.seq_length * model.hidden_size
    return _pages(math.ceil(model.num_layers * outputs * (tp - 1) / tp))


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
