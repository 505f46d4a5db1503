"""Requests of the ends of the model: embedding, table of positions, final norm and loss."""

from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import vocab_rows_per_rank
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.matrices import hidden_bytes, multiply
from memo.estimate.program.messages import all_gather, scattered
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tokenwise import Normed, norm_backward, norm_forward
from memo.spec.lora import is_trained
from memo.spec.stack import num_rotations

_TOKEN_BYTES = 4
"""Bytes of a token, a label or a position. Kernels take labels in this width; torch takes indices of rows in
_INDEX_BYTES."""
_INDEX_BYTES = 8
_WEIGHT_BYTES = 8
"""Bytes of the weight of a token's loss."""
_EMBEDDING_CHUNK = 8192
"""Tokens that are looked up at a time, as in memo.parallel.embedding."""
_SEGMENT_TOKENS = 10
"""Tokens of one row whose gradients a GPU sums in one piece, in fp32."""


_TABLES = ("embedding.weight", "position_embedding.weight", "head.weight", "final_norm.weight")


class EndSizes(NamedTuple):
    """The vocabulary's part of this rank.

    Attributes:
        rows: rows of the embedding and of the head, padding included.
        positions: rows of a learned position table.
        chunk: tokens whose logits exist at once.
        tied: whether the head is the embedding's matrix and both are on the same stage.
        scaled: whether the embedding's output is multiplied by a factor.
        capped: whether logits have a cap.
        rotations: number of RoPE's tables.
        frozen: global tensors of the ends that are not trained.
    """

    rows: int
    positions: int
    chunk: int
    tied: bool
    scaled: bool
    capped: bool
    rotations: int
    frozen: frozenset[str] = frozenset()


def end_sizes(config: RunConfig, sizes: LayerSizes) -> EndSizes:
    parallel, model = config.parallel, config.model
    step = max(1, config.training.loss_chunk_size // (sizes.tp * sizes.batch)) * sizes.tp * sizes.batch
    return EndSizes(
        rows=vocab_rows_per_rank(model.vocabulary, parallel.tp),
        positions=model.position_rows(config.data.seq_length),
        chunk=min(step, sizes.cut),
        tied=parallel.pp == 1 and not model.untie_embeddings_and_output_weights,
        scaled=model.scale_embeddings,
        capped=model.final_logit_softcapping > 0,
        rotations=num_rotations(model),
        frozen=frozenset(name for name in _TABLES if not is_trained(model, name)),
    )


def _has_two_orders(sizes: LayerSizes) -> bool:
    """Whether a rank holds its tokens in another order than attention does (memo.train.feed)."""
    return sizes.tp > 1 and sizes.tiles > 1


def batch_bytes(sizes: LayerSizes) -> int:
    """Bytes of tokens, labels, positions in each order, and loss weights in fp64 of one microbatch."""
    return sizes.tokens * ((4 if _has_two_orders(sizes) else 3) * _TOKEN_BYTES + _WEIGHT_BYTES)


def order_bytes(sizes: LayerSizes) -> int:
    """Bytes of the indices of this rank's tokens in the sequence."""
    return (2 if _has_two_orders(sizes) else 1) * (sizes.tokens // sizes.batch) * _INDEX_BYTES


def embedding_forward(ledger: Ledger, sizes: LayerSizes, ends: EndSizes) -> Block:
    x = ledger.make("input", sizes.between_layers)
    if _is_in_chunks(sizes, ends):
        chunk = _embedding_chunk(sizes)
        rows = [ledger.make("rows", chunk * _TOKEN_BYTES), ledger.make("foreign", chunk)]
        embedded = ledger.make("embedded", hidden_bytes(sizes, chunk))
        ledger.scratch(("gloo", hidden_bytes(sizes, chunk) if sizes.tp > 1 else 0))
        if sizes.sections and ends.positions:
            ledger.scratch(("positions", hidden_bytes(sizes, chunk) // sizes.tp))
        ledger.free(embedded, *rows)
    if ends.positions and not sizes.sections:
        looked_up = ledger.make("positions", sizes.between_layers)
        total = ledger.make("input", sizes.between_layers)
        ledger.free(looked_up, x)
        x = total
    return x


def _is_in_chunks(sizes: LayerSizes, ends: EndSizes) -> bool:
    return sizes.tp > 1 or bool(sizes.sections) or "embedding.weight" in ends.frozen


def _embedding_chunk(sizes: LayerSizes) -> int:
    """Tokens that are looked up at a time, as in memo.parallel.embedding."""
    return min(_EMBEDDING_CHUNK, sizes.cut)


def embedding_backward(
    ledger: Ledger, sizes: LayerSizes, ends: EndSizes, grad: Block | None, of_head: Block | None
) -> None:
    """Run the backward of the embedding.

    Frees `grad` (None if the caller holds it) and `of_head`, the head's part of a tied gradient."""
    has_table, has_positions = (name not in ends.frozen for name in _TABLES[:2])
    size, of_positions = ends.rows * sizes.hidden * has_table, ends.positions * sizes.hidden * has_positions
    if of_positions and not sizes.sections:
        _add_rows(ledger, sizes, sizes.tokens, of_positions)
    if not _is_in_chunks(sizes, ends):
        scaled = ledger.make("scaled gradient", sizes.between_layers if ends.scaled else 0)
        if ends.scaled:
            ledger.free(grad)
            grad = scaled
        table = ledger.make("embedding gradient", size * sizes.narrow)
        ledger.scratch(("sums of segments", _segment_bytes(sizes, sizes.tokens, ends.rows * has_table)))
        ledger.free(grad)
        tables = [table]
    else:
        elements = [size, of_positions] if of_positions and sizes.sections else [size]
        # On GPUs the parts are added to the main gradients at once.
        sums = [] if sizes.on_cuda else [ledger.make("embedding gradient", each * sizes.wide) for each in elements]
        chunk = _embedding_chunk(sizes)
        rows = [ledger.make("rows", chunk * _TOKEN_BYTES), ledger.make("foreign", chunk)]
        for each in elements[1:]:
            _add_rows(ledger, sizes, chunk // sizes.tp, each)
        gathered = all_gather(ledger, sizes.tp, "gathered", hidden_bytes(sizes, chunk) * has_table)
        _add_rows(ledger, sizes, chunk, size)
        ledger.free(gathered, *rows)
        tables = sums
        if sizes.mixed and sums:
            tables = [ledger.make("embedding gradient", each * sizes.narrow) for each in elements]
            ledger.free(*sums)
        ledger.free(grad)
    ledger.free(of_head)  # added in place
    if sizes.mixed:
        ledger.scratch(("wide embedding gradient", size * sizes.wide))
    ledger.free(*tables)


def _add_rows(ledger: Ledger, sizes: LayerSizes, tokens: int, size: int) -> None:
    """Sum the gradients of these tokens by row of a table of `size` elements, and add them to those of others."""
    part = ledger.make("embedding gradient", size * sizes.narrow)
    ledger.scratch(("sums of segments", _segment_bytes(sizes, tokens, size // sizes.hidden)))
    if sizes.mixed:
        ledger.scratch(("wide embedding gradient", size * sizes.wide))
    ledger.free(part)


def _segment_bytes(sizes: LayerSizes, tokens: int, rows: int) -> int:
    """Return the bytes of sums in aten::embedding_dense_backward on a GPU.

    The kernel sorts tokens by row and first sums segments; this bounds their number."""
    segments = -(-tokens // _SEGMENT_TOKENS) + min(tokens, rows)
    return segments * sizes.hidden * 4 if sizes.on_cuda and rows else 0


def rope_frequency_bytes(sizes: LayerSizes, rotations: int) -> int:
    """Return the bytes of the frequencies from which RoPE's tables are made: one fp64 number per two dims.

    Each pipeline chunk keeps them for the whole run."""
    return 8 * (sizes.rotary_dim // 2) * rotations


def rope_table_bytes(sizes: LayerSizes) -> int:
    rest = sizes.scales_queries and sizes.rotary_dim < sizes.head_dim  # a factor on the channels that are not rotated
    return sizes.tokens * ((sizes.rotary_dim // 2) * 2 * (2 if sizes.scales_queries else 1) + rest) * sizes.narrow


def rope_table(ledger: Ledger, sizes: LayerSizes) -> Block:
    """Make the table with cos and sin for every token and pair of dims; angles and scales of queries are in fp64."""
    pairs = sizes.tokens * sizes.rotary_dim // 2
    angles = ledger.make("angles", 8 * pairs)
    table = [_cast(ledger, sizes, pairs) for _ in range(2)]
    if sizes.scales_queries:
        scales = ledger.make("scales", 2 * 8 * sizes.tokens)  # with the factor on cos and sin, and without it
        table += [_cast(ledger, sizes, pairs) for _ in range(2)]
        ledger.free(scales)
    ledger.free(angles, *table)
    return ledger.make("rope table", rope_table_bytes(sizes))


def _cast(ledger: Ledger, sizes: LayerSizes, pairs: int) -> Block:
    values = ledger.make("angles", 8 * pairs)
    scaled = ledger.make("angles", 8 * pairs)
    ledger.free(values)
    cast = ledger.make("rope table", pairs * sizes.narrow)
    ledger.free(scaled)
    return cast


def loss_backward(ledger: Ledger, sizes: LayerSizes, ends: EndSizes) -> Block | None:
    """Return the head's gradient if a tied embedding adds its own gradient to it, else None.

    The gradient of the last layer's output overwrites this output. On GPUs products add to the head's main gradient
    themselves. The forward of the loss requests nothing in training.
    """
    size = 0 if sizes.on_cuda else _trained_head(sizes, ends)
    of_norm = 0 if "final_norm.weight" in ends.frozen else (1 if sizes.rms else 2) * sizes.hidden
    waits = ends.tied and size > 0
    sums = ledger.make("norm weight gradients", of_norm * sizes.wide)
    total = ledger.make("head gradient", size * sizes.wide)
    _loss_chunk_backward(ledger, sizes, ends)
    gradients, gradient = sums, total
    if sizes.mixed:
        gradients = ledger.make("norm weight gradients", of_norm * sizes.narrow)
        gradient = ledger.make("head gradient", size * sizes.narrow)
        ledger.free(sums, total)
    if not waits:
        if sizes.mixed:
            ledger.scratch(("wide head gradient", size * sizes.wide))
        ledger.free(gradient)
    ledger.free(gradients)
    ledger.mark_reduction_start()
    return gradient if waits else None


def _loss_chunk_backward(ledger: Ledger, sizes: LayerSizes, ends: EndSizes) -> None:
    # On GPUs, and where no sum is wider, the product adds to the sum itself.
    size = _trained_head(sizes, ends) if sizes.mixed and not sizes.on_cuda else 0
    copied = _TOKEN_BYTES + _WEIGHT_BYTES if sizes.tp > 1 else 0
    # Labels in another form, the three numbers of softmax, and the gradient of the loss.
    of_tokens = ledger.make("tokens of a chunk", ends.chunk * (copied + _INDEX_BYTES + 4 * sizes.wide))
    norm = norm_forward(ledger, sizes, "final norm", ends.chunk // sizes.tp, sizes.hidden, graph=True)
    gathered = _gathered(ledger, sizes, ends, norm)
    logits = _logits(ledger, sizes, ends)
    slopes = ledger.make("slopes of capped logits", logits.num_bytes if ends.capped else 0)
    wide = ends.chunk * ends.rows * sizes.wide if sizes.mixed else 0  # softmax's gradient overwrites the logits
    ledger.scratch(("exponentials", wide), ("labels as indices", ends.chunk * (_INDEX_BYTES + sizes.wide)))
    ledger.free(slopes)
    grad_gathered = ledger.make("gathered gradient", hidden_bytes(sizes, ends.chunk))
    multiply(ledger, sizes, ends.chunk * sizes.hidden)
    grad_normed = scattered(ledger, sizes.tp, "hidden gradient", grad_gathered)
    weight = ledger.make("head gradient of a chunk", size * sizes.narrow)
    if sizes.mixed:
        ledger.scratch(("wide head gradient", size * sizes.wide))
    ledger.free(weight, logits, gathered if sizes.tp > 1 else None)
    grad_x = norm_backward(ledger, sizes, norm)
    ledger.free(grad_x, norm.out, grad_normed, of_tokens)


def _trained_head(sizes: LayerSizes, ends: EndSizes) -> int:
    """Elements of the head's gradient; 0 if the head is frozen."""
    return 0 if ("embedding.weight" if ends.tied else "head.weight") in ends.frozen else ends.rows * sizes.hidden


def _gathered(ledger: Ledger, sizes: LayerSizes, ends: EndSizes, norm: Normed) -> Block | None:
    """Return the normed tokens of one chunk, gathered over tp."""
    return all_gather(ledger, sizes.tp, "gathered", hidden_bytes(sizes, ends.chunk), norm.out)


def _logits(ledger: Ledger, sizes: LayerSizes, ends: EndSizes) -> Block:
    logits = ledger.make("logits", ends.chunk * ends.rows * sizes.narrow)
    multiply(ledger, sizes, ends.chunk * ends.rows)
    return logits
