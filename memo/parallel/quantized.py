"""Quantizes frozen matrices to codes, and decodes them (memo.spec.quantized has the formats).

NF4 gives the same bytes as bitsandbytes: the first of two numbers is in the upper half of a byte, a scale is the
largest absolute value of its block, and a number on the border between two codes gets the lower code. Decoded numbers
are exact in fp32, and rounded to the dtype of the model once.
"""

import torch
from torch import Tensor

from memo.config.model import Quantization
from memo.spec.buckets import BucketPlan
from memo.spec.quantized import BLOCK, CHUNK, code_bytes, coded_bytes

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of the normal distribution, scaled to -1 and 1 (QLoRA, appendix E)."""
_LEAST = 1e-38


class CodedBucket:
    """The codes of a bucket's matrices, whole on this rank.

    Attributes:
        code: uint8, the codes, then the scales.
    """

    def __init__(self, plan: BucketPlan, quantize: Quantization, device: torch.device) -> None:
        self.plan, self.quantize = plan, quantize
        self.code = torch.zeros(coded_bytes(quantize, plan.size), dtype=torch.uint8, device=device)
        count = code_bytes(quantize, plan.size)
        self.codes, self.scales = self.code[:count], self.code[count:].view(torch.float32)

    @torch.no_grad()
    def encode(self, flat: Tensor) -> None:
        """Encode the numbers of the whole bucket, 1-D."""
        is_nf4, levels = self.quantize == "nf4", torch.tensor(NF4, device=flat.device)
        for start in range(0, self.plan.size, CHUNK):
            blocks = flat[start : start + CHUNK].float().view(-1, BLOCK)
            scales = self.scales[start // BLOCK : start // BLOCK + len(blocks)]
            torch.amax(blocks.abs(), 1, out=scales)
            scaled = blocks * (1.0 / scales.clamp(min=_LEAST)).unsqueeze(1)
            stop = start + blocks.numel()
            if is_nf4:
                codes = torch.bucketize(scaled.flatten(), (levels[:-1] + levels[1:]) / 2, out_int32=True)
                self.codes[start // 2 : stop // 2].copy_(codes[::2] * 16 + codes[1::2])
            else:
                self.codes[start:stop].view(torch.int8).copy_((scaled * 127).round().flatten())


class Decoder:
    """Decodes buckets, with working memory that it allocates once."""

    def __init__(self, numel: int, device: torch.device) -> None:
        """`numel`: elements of the largest bucket."""
        size = min(numel, CHUNK)
        first, second = torch.meshgrid(torch.tensor(NF4), torch.tensor(NF4), indexing="ij")
        self._pairs = torch.stack((first, second), -1).view(256, 2).to(device)  # the two numbers of each byte
        self._index = torch.empty(size // 2, dtype=torch.int32, device=device)
        self._values = torch.empty(size, dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        return self._index.nbytes + self._values.nbytes

    @torch.no_grad()
    def decode(self, bucket: CodedBucket, out: Tensor) -> None:
        """Decode a bucket to `out`, 1-D and as large as the bucket."""
        for start in range(0, bucket.plan.size, CHUNK):
            part = out[start : start + CHUNK]
            values = self._values[: len(part)]
            if bucket.quantize == "nf4":
                index = self._index[: len(part) // 2]
                index.copy_(bucket.codes[start // 2 : (start + len(part)) // 2])
                torch.index_select(self._pairs, 0, index, out=values.view(-1, 2))
            else:
                torch.div(bucket.codes[start : start + len(part)].view(torch.int8), 127.0, out=values)
            scales = bucket.scales[start // BLOCK : (start + len(part)) // BLOCK]
            torch.mul(values.view(-1, BLOCK), scales.unsqueeze(1), out=part.view(-1, BLOCK))
