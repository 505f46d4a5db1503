"""The error of a foreseen step, from the parts of the step and the evidence for each part.

A step of 8,192 tokens is mostly products, and a step of a million tokens is attention alone. So each part has an error
of its own, with its own evidence, and the error of a step is their sum by the seconds that each part takes. The sum is
linear: where published runs were missed, the parts were missed to the same side (28 of 31 on B200 took longer than
foreseen).
benchmarks/simulator_accuracy.py, benchmarks/held_out_accuracy.py and benchmarks/step_sources.py compare published runs,
benchmarks/gpu_accuracy.py those of memo on one H200, and tests hold the figures here to what they find.
"""

from collections.abc import Iterable
from typing import NamedTuple

from memo.estimate.hardware import Hardware
from memo.estimate.hardware_files import HARDWARE

TIE_SHARE = 0.05
"""Two plans of one machine are equally good if their foreseen speeds differ by a smaller share.

Of published pairs of layouts (same model, machine and number of GPUs) that were foreseen this near each other, the
layout foreseen to be faster was slower in three of ten; of pairs foreseen further apart, in one of twenty-one.
"""


class Copies(NamedTuple):
    """Seconds of copies of activations in a foreseen step, and of the compute that hides them.

    Attributes:
        offload, prefetch: seconds of copies to host memory or disk in forwards, and back in backwards.
        forward, backward: seconds of the layers.
        always_share: share of the bytes that every plan of memo's moves; 1 where the plan does not choose.
        spared: seconds of recomputation that a plan would have if it did not move the other bytes.
    """

    offload: float
    prefetch: float
    forward: float
    backward: float
    always_share: float = 1.0
    spared: float = 0.0

    def late_s(self, share: float) -> float:
        """Seconds by which a step takes longer if copies take longer by `share`.

        --offload-alpha auto measures the link and recomputes the activations whose copies it can no longer hide. So for
        bytes that a plan may leave out, no more time is lost than the recomputation of those that the slower link
        cannot move.
        """
        late_s = self._exposed_s(1 + share) - self._exposed_s(1)
        if self.always_share == 1:
            return late_s
        left_out = min(1.0, share / (1 + share) / (1 - self.always_share))
        return max(self._exposed_s((1 + share) * self.always_share), min(late_s, left_out * self.spared))

    def _exposed_s(self, times: float) -> float:
        return max(0.0, times * self.offload - self.forward) + max(0.0, times * self.prefetch - self.backward)


class StepParts(NamedTuple):
    """Seconds of the parts of a foreseen step, averaged over its stages; the first seven add up to the step.

    Attributes:
        attention, products: kernels of attention, and matrix products, recomputed ones included.
        messages: collectives of tp, cp and dp, as far as compute waits for them.
        token_wise: operations that memory binds: norms, RoPE, activations, sums, the loss, the optimizer.
        waiting: stages of the pipeline that wait for each other.
        host: kernels that wait for the host to start them.
        copies: compute that waits for copies to host memory and back.
        of_activations: all copies of activations, hidden ones too.
        link: seconds that activations and states take on the busiest direction of the link to the host.
        has_experts: whether products are mostly those of experts.
        has_slow_attention: whether attention runs by FlashAttention 2 on a GPU for which other kernels are faster.
        has_unmeasured_host: whether no published run tells the time of the program's host between kernels.
    """

    attention: float
    products: float
    messages: float
    token_wise: float
    waiting: float
    host: float
    copies: float
    of_activations: Copies
    link: float
    has_unmeasured_host: bool = False
    has_experts: bool = False
    has_slow_attention: bool = False

    @property
    def step_s(self) -> float:
        return sum(getattr(self, name) for name in PARTS)

    def late_copies_s(self, share: float) -> float:
        """Seconds by which a step takes longer if copies take longer by `share`; a step takes no less time than its
        link."""
        of_states_s = (1 + share) * self.link - self.step_s if self.of_activations.always_share == 1 else 0.0
        return max(self.of_activations.late_s(share), share * self.copies, of_states_s)


PARTS = ("attention", "products", "messages", "token_wise", "waiting", "host", "copies")


class Evidence(NamedTuple):
    """Possible errors of the seconds foreseen for some parts, as shares of them, and the source of this knowledge."""

    shares: dict[str, float]
    source: str

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', '-')} {share:.0%}" for name, share in self.shares.items())
        return f"{parts} ({self.source})"


class TimeError(NamedTuple):
    """The possible error of a step.

    Attributes:
        shares: {part: share of the step by which it may be off}; they add up to `share`.
        evidence: the evidence for every part on the machine.
    """

    shares: dict[str, float]
    evidence: tuple[Evidence, ...]

    @property
    def share(self) -> float:
        return sum(self.shares.values())

    def __str__(self) -> str:
        """How far the seconds of each part of a step may be off; a machine has the same for all its steps."""
        parts = {name: f"{name.replace('_', '-')} {share:.0%}" for name, share in _shares(self.evidence).items()}
        parts["host"] += f" and {HOST_STEP_S:g} s a step"
        return f"±%: errors of the seconds of a step: {', '.join(parts.values())}"


HOST_STEP_S = 0.22
"""Two published steps of a 0.6B model on H100 (prime-rl at 8K and 16K) took 0.24 and 0.27 s longer than foreseen, which
hardly grows with their length, and nobody has said why. No host of memo's own program beside a GPU was measured."""
_HOST = Evidence(
    {"host": 0.5},
    f"and {HOST_STEP_S:g} s a step: assumed, from the number of kernels, the CPU time of a kernel on the machine that "
    "counted them, and two steps of prime-rl",
)
_COPIES = Evidence({"copies": 0.5}, "assumed: no published run says what such a link reaches")
_A100 = (
    Evidence({"attention": 0.03}, "30 published steps of MEMO on A800, 64K to 1.4M tokens"),
    Evidence(
        {"products": 0.04, "messages": 0.4, "token_wise": 0.6, "waiting": 0.6},
        "nine of ten of 85 published runs of Megatron-LM on A100 at 8K tokens lie within",
    ),
    _HOST,
    Evidence({"copies": 0.1}, "MEMO's table 4, full swapping on A800, to which the link's rate was fitted"),
)
_H100 = (
    Evidence(
        {"attention": 0.2},
        "chosen by four steps of memo on one H200, 32K to 128K tokens, each foreseen within 3%; TRL's step of 1M "
        "tokens is 7% longer than foreseen, prime-rl's two of 64K 1% shorter, 10% without what an RL run does besides",
    ),
    Evidence(
        {"products": 0.04, "messages": 0.1, "token_wise": 0.1, "waiting": 0.1},
        "nine of ten of 60 published runs of Megatron-LM on H100 at 8K tokens lie within",
    ),
    _HOST,
    Evidence({"copies": 0.5}, "assumed for all GPUs of a node at once; one H200 alone was measured"),
)
_B200 = (
    Evidence(
        {"products": 0.07, "messages": 0.4, "token_wise": 0.3, "waiting": 0.1},
        "nine of ten of 31 published runs of Megatron-LM on B200 at 4K to 128K tokens lie within; none was fitted",
    ),
    Evidence({"attention": 0.2}, "assumed as on H100"),
    _HOST,
    _COPIES,
)
_OTHERS = (
    Evidence(
        dict.fromkeys(("attention", "products", "messages", "token_wise", "waiting"), 0.3),
        "nine of ten of 60 published runs on H100 lie within, foreseen with A100's efficiencies as this machine is "
        "with another's",
    ),
    _HOST,
    _COPIES,
)
EXPERTS = Evidence(
    {"products": 0.25},
    "of a mixture of experts: chosen by prime-rl's three steps of Qwen3-30B-A3B on H100 and H200 at 16K tokens; memo's "
    "own step of gpt-oss-20b with adapters on one H200 says a quarter less",
)
FLASH_2 = Evidence(
    {"attention": 0.25},
    "by FlashAttention 2 where others are quicker: on B200 chosen by prime-rl's two steps without LoRA; its three of "
    "other models with LoRA say 6% to 17% more, forward kernels alone 11% less; on H200 measured at one shape, on "
    "other chips assumed",
)
_KNOWN = {"a100-40": _A100, "h100-94": _H100, "b200": _B200}
"""{machine whose shares of the peaks were fitted: evidence}; it holds for all machines with the same shares."""


def time_error(hardware: Hardware, parts: StepParts) -> TimeError:
    """The error of a step that is foreseen for a machine.

    A machine of another chip, or with efficiencies that no published runs chose, has the error that H100 had before
    there were runs to fit.
    """
    evidence = evidence_of(hardware)
    for applies, more in ((parts.has_experts, EXPERTS), (parts.has_slow_attention, FLASH_2)):
        known = _shares(evidence)
        if applies and any(known[name] < share for name, share in more.shares.items()):
            evidence = (*evidence, more)
    seconds = {name: share * getattr(parts, name) for name, share in _shares(evidence).items() if name != "copies"}
    seconds["host"] += HOST_STEP_S if parts.has_unmeasured_host else 0.0
    seconds["copies"] = parts.late_copies_s(_shares(evidence)["copies"])
    return TimeError({name: late_s / parts.step_s for name, late_s in seconds.items()}, evidence)


def evidence_of(hardware: Hardware) -> tuple[Evidence, ...]:
    """The evidence for every part of a step on a machine; models with experts or a slow attention have more."""
    for name, evidence in _KNOWN.items():
        known = HARDWARE[name]
        if (known.capability, known.efficiency) == (hardware.capability, hardware.efficiency):
            return evidence
    return _OTHERS


def _shares(evidence: Iterable[Evidence]) -> dict[str, float]:
    """The share of each part; later evidence replaces earlier."""
    return {name: share for each in evidence for name, share in each.shares.items()}
