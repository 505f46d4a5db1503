"""Requests of the ends of the model: embedding, table of positions, final norm and loss."""

from dataclasses import dataclass

from memo.config import RunConfig
from memo.config.derived import vocab_rows_per_rank
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.matrices import add_gradient, hidden_bytes, multiply
from memo.estimate.program.messages import all_gather, scattered
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tokenwise import Normed, norm_backward, norm_forward
from memo.spec.lora import is_trained
from memo.spec.stack import num_rotations

_TOKEN_BYTES = 4
"""Bytes of a token, a label or a position. Kernels take labels in this width; torch takes indices of rows in
_INDEX_BYTES."""
_INDEX_BYTES = 8
_EMBEDDING_CHUNK = 8192
"""Tokens that are looked up at a time, as in memo.parallel.embedding."""
_SEGMENT_TOKENS = 10
"""Tokens of one row whose gradients a GPU sums in one piece, in fp32."""


_TABLES = ("embedding.weight", "position_embedding.weight", "head.weight", "final_norm.weight")


@dataclass(frozen=True)
class EndSizes:
    """The vocabulary's part of this rank.

    Attributes:
        rows: rows of the embedding and of the head, padding included.
        positions: rows of a learned position table.
        chunk: tokens whose logits exist at once.
        tied: whether the head is the embedding's matrix and both are on the same stage.
        scaled: whether the embedding's output is multiplied by a factor.
        rotations: number of RoPE's tables.
        frozen: global tensors of the ends that are not trained.
    """

    rows: int
    positions: int
    chunk: int
    tied: bool
    scaled: bool
    rotations: int
    frozen: frozenset[str] = frozenset()


def end_sizes(config: RunConfig, z: LayerSizes) -> EndSizes:
    parallel, model = config.parallel, config.model
    step = max(1, config.training.loss_chunk_size // (z.tp * z.batch)) * z.tp * z.batch
    return EndSizes(
        rows=vocab_rows_per_rank(model.vocabulary, parallel.tp),
        positions=model.position_rows(config.data.seq_length),
        chunk=min(step, z.cut),
        tied=parallel.pp == 1 and not model.untie_embeddings_and_output_weights,
        scaled=model.scale_embeddings,
        rotations=num_rotations(model),
        frozen=frozenset(name for name in _TABLES if not is_trained(model, name)),
    )


def _has_two_orders(z: LayerSizes) -> bool:
    """Whether a rank holds its tokens in another order than attention does (memo.train.feed)."""
    return z.tp > 1 and z.tiles > 1


def batch_bytes(z: LayerSizes) -> int:
    """Bytes of tokens, labels, positions in each order, and loss weights in fp64 of one microbatch."""
    return z.tokens * ((4 if _has_two_orders(z) else 3) * _TOKEN_BYTES + 8)


def order_bytes(z: LayerSizes) -> int:
    """Bytes of the indices of this rank's tokens in the sequence."""
    return (2 if _has_two_orders(z) else 1) * (z.tokens // z.batch) * _INDEX_BYTES


def embedding_forward(ledger: Ledger, z: LayerSizes, ends: EndSizes) -> Block:
    x = ledger.make("input", z.between_layers)
    if _is_in_chunks(z, ends):
        chunk = _embedding_chunk(z)
        rows = [ledger.make("rows", chunk * _TOKEN_BYTES), ledger.make("foreign", chunk)]
        embedded = ledger.make("embedded", hidden_bytes(z, chunk))
        ledger.scratch(("gloo", hidden_bytes(z, chunk) if z.tp > 1 else 0))
        if z.sections and ends.positions:
            ledger.scratch(("positions", hidden_bytes(z, chunk) // z.tp))
        ledger.free(embedded, *rows)
    if ends.positions and not z.sections:
        looked_up = ledger.make("positions", z.between_layers)
        total = ledger.make("input", z.between_layers)
        ledger.free(looked_up, x)
        x = total
    return x


def _is_in_chunks(z: LayerSizes, ends: EndSizes) -> bool:
    return z.tp > 1 or bool(z.sections) or "embedding.weight" in ends.frozen


def _embedding_chunk(z: LayerSizes) -> int:
    """Tokens that are looked up at a time, as in memo.parallel.embedding."""
    return min(_EMBEDDING_CHUNK, z.cut)


def embedding_backward(
    ledger: Ledger, z: LayerSizes, ends: EndSizes, grad: Block | None, of_head: Block | None
) -> None:
    """Run the backward of the embedding.

    Frees `grad` (None if the caller holds it) and `of_head`, the head's part of a tied gradient."""
    has_table, has_positions = (name not in ends.frozen for name in _TABLES[:2])
    size, of_positions = ends.rows * z.hidden * has_table, ends.positions * z.hidden * has_positions
    if of_positions and not z.sections:
        add_gradient(ledger, z, of_positions)
    if not _is_in_chunks(z, ends):
        scaled = ledger.make("scaled gradient", z.between_layers if ends.scaled else 0)
        if ends.scaled:
            ledger.free(grad)
            grad = scaled
        table = ledger.make("embedding gradient", size * z.narrow)
        ledger.free(grad)
        tables = [table]
    else:
        sizes = [size, of_positions] if of_positions and z.sections else [size]
        # On GPUs the parts are added to the main gradients at once.
        sums = [] if z.on_cuda else [ledger.make("embedding gradient", each * z.wide) for each in sizes]
        chunk = _embedding_chunk(z)
        rows = [ledger.make("rows", chunk * _TOKEN_BYTES), ledger.make("foreign", chunk)]
        for each in sizes[1:]:
            _add_rows(ledger, z, chunk // z.tp, each)
        gathered = all_gather(ledger, z.tp, "gathered", hidden_bytes(z, chunk) * has_table)
        _add_rows(ledger, z, chunk, size)
        ledger.free(gathered, *rows)
        tables = sums
        if z.mixed and sums:
            tables = [ledger.make("embedding gradient", each * z.narrow) for each in sizes]
            ledger.free(*sums)
        ledger.free(grad)
    ledger.free(of_head)  # added in place
    if z.mixed:
        ledger.scratch(("wide embedding gradient", size * z.wide))
    ledger.free(*tables)


def _add_rows(ledger: Ledger, z: LayerSizes, tokens: int, size: int) -> None:
    """Sum the gradients of a chunk by row of a table of `size` elements, and add them to those of other chunks."""
    part = ledger.make("embedding gradient", size * z.narrow)
    ledger.scratch(("sums of segments", _segment_bytes(z, tokens, size // z.hidden)))
    if z.mixed:
        ledger.scratch(("wide embedding gradient", size * z.wide))
    ledger.free(part)


def _segment_bytes(z: LayerSizes, tokens: int, rows: int) -> int:
    """Return the bytes of sums in aten::embedding_dense_backward on a GPU.

    The kernel sorts tokens by row and first sums segments; this bounds their number."""
    segments = -(-tokens // _SEGMENT_TOKENS) + min(tokens, rows)
    return segments * z.hidden * 4 if z.on_cuda and rows else 0


def rope_frequency_bytes(z: LayerSizes, rotations: int) -> int:
    """Return the bytes of the frequencies from which RoPE's tables are made: one fp64 number per two dims.

    Each pipeline chunk keeps them for the whole run."""
    return 8 * (z.rotary_dim // 2) * rotations


def rope_table_bytes(z: LayerSizes) -> int:
    return z.tokens * (z.rotary_dim // 2) * 2 * z.narrow


def rope_table(ledger: Ledger, z: LayerSizes) -> Block:
    """Make the table with cos and sin for every token and pair of dims; the angles are in fp64."""
    pairs = z.tokens * z.rotary_dim // 2
    angles = ledger.make("angles", 8 * pairs)
    table = [_cast(ledger, z, pairs) for _ in range(2)]
    ledger.free(angles, *table)
    return ledger.make("rope table", rope_table_bytes(z))


def _cast(ledger: Ledger, z: LayerSizes, pairs: int) -> Block:
    values = ledger.make("angles", 8 * pairs)
    scaled = ledger.make("angles", 8 * pairs)
    ledger.free(values)
    cast = ledger.make("rope table", pairs * z.narrow)
    ledger.free(scaled)
    return cast


def loss_forward(ledger: Ledger, z: LayerSizes, ends: EndSizes) -> Block:
    """Forward of final norm and loss. Returns the log-sum-exp, which is kept together with the hidden states."""
    lse = ledger.make("log-sum-exp", z.tokens * z.wide)
    norm = norm_forward(ledger, z, "final norm", ends.chunk // z.tp, z.hidden, graph=False)
    gathered = _gathered(ledger, z, ends, norm)  # each chunk frees its tensors before the next chunk begins
    if z.tp > 1:
        ledger.free(norm.out)
    logits = _logits(ledger, z, ends)
    ledger.free(gathered)
    _softmax(ledger, z, ends)
    ledger.free(logits)
    return lse


def loss_backward(ledger: Ledger, z: LayerSizes, ends: EndSizes, lse: Block) -> Block | None:
    """Return the head's gradient if a tied embedding adds its own gradient to it, else None.

    The gradient of the last layer's output overwrites this output. On GPUs products add to the head's main gradient
    themselves.
    """
    size = 0 if z.on_cuda else _trained_head(z, ends)
    of_norm = 0 if "final_norm.weight" in ends.frozen else (1 if z.rms else 2) * z.hidden
    waits = ends.tied and size > 0
    sums = ledger.make("norm weight gradients", of_norm * z.wide)
    total = ledger.make("head gradient", size * z.wide)
    _loss_chunk_backward(ledger, z, ends)
    gradients, gradient = sums, total
    if z.mixed:
        gradients = ledger.make("norm weight gradients", of_norm * z.narrow)
        gradient = ledger.make("head gradient", size * z.narrow)
        ledger.free(sums, total)
    ledger.free(lse)
    if not waits:
        if z.mixed:
            ledger.scratch(("wide head gradient", size * z.wide))
        ledger.free(gradient)
    ledger.free(gradients)
    ledger.mark_reduction_start()
    return gradient if waits else None


def _loss_chunk_backward(ledger: Ledger, z: LayerSizes, ends: EndSizes) -> None:
    size = _trained_head(z, ends) if z.mixed and not z.on_cuda else 0  # else the product adds to the sum itself
    copied = _TOKEN_BYTES + z.wide if z.tp > 1 else 0  # label and log-sum-exp
    of_tokens = ledger.make("tokens of a chunk", ends.chunk * (copied + z.wide))
    norm = norm_forward(ledger, z, "final norm", ends.chunk // z.tp, z.hidden, graph=True)
    gathered = _gathered(ledger, z, ends, norm)
    logits = _logits(ledger, z, ends)
    _softmax(ledger, z, ends)  # its gradient overwrites the logits
    grad_gathered = ledger.make("gathered gradient", hidden_bytes(z, ends.chunk))
    multiply(ledger, z, ends.chunk * z.hidden)
    grad_normed = scattered(ledger, z.tp, "hidden gradient", grad_gathered)
    weight = ledger.make("head gradient of a chunk", size * z.narrow)
    if z.mixed:
        ledger.scratch(("wide head gradient", size * z.wide))
    ledger.free(weight, logits, gathered if z.tp > 1 else None)
    grad_x = norm_backward(ledger, z, norm)
    ledger.free(grad_x, norm.out, grad_normed, of_tokens)


def _trained_head(z: LayerSizes, ends: EndSizes) -> int:
    """Elements of the head's gradient; 0 if the head is frozen."""
    return 0 if ("embedding.weight" if ends.tied else "head.weight") in ends.frozen else ends.rows * z.hidden


def _gathered(ledger: Ledger, z: LayerSizes, ends: EndSizes, norm: Normed) -> Block | None:
    """Return the normed tokens of one chunk, gathered over tp."""
    return all_gather(ledger, z.tp, "gathered", hidden_bytes(z, ends.chunk), norm.out)


def _logits(ledger: Ledger, z: LayerSizes, ends: EndSizes) -> Block:
    logits = ledger.make("logits", ends.chunk * ends.rows * z.narrow)
    multiply(ledger, z, ends.chunk * ends.rows)
    return logits


def _softmax(ledger: Ledger, z: LayerSizes, ends: EndSizes) -> None:
    """Request the tensors of softmax or its gradient: a wide copy of narrow logits, and labels in two forms."""
    wide = ends.chunk * ends.rows * z.wide if z.mixed else 0
    ledger.scratch(("wide logits", wide), ("local labels", ends.chunk * (2 * _INDEX_BYTES + z.wide)))
