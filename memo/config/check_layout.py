"""Rules about spreading the model, the sequence and the batch over the ranks."""

from memo.config.derived import data_parallel_size, global_batch_size, num_microbatches, sequence_step
from memo.config.model import LINEAR
from memo.config.require import divisors, neighbours, require
from memo.config.run import RunConfig
from memo.config.unread import require_read


def check_layout(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError; sizes are known to be positive, heads to divide into query groups."""
    _check_world(config, world_size)
    _check_tensor(config)
    _check_sequence(config)
    _check_ulysses(config)
    _check_linear(config)
    _check_pipeline(config)


def _check_world(config: RunConfig, world_size: int) -> None:
    parallel = config.parallel
    need = parallel.model_ranks
    require(
        world_size % need == 0,
        f"{world_size} ranks (world size) cannot hold whole copies of the model: --tp {parallel.tp} x --cp "
        f"{parallel.cp} x --pp {parallel.pp} = {need}: start {neighbours(world_size, need)} ranks with torchrun, or "
        f"choose --tp, --cp and --pp whose product is {divisors(world_size)}",
    )


def _check_tensor(config: RunConfig) -> None:
    model, tp = config.model, config.parallel.tp
    heads, groups, ffn = model.num_attention_heads, model.kv_heads, model.ffn_size
    require(
        heads % tp == 0,
        f"--num-attention-heads {heads} does not divide by --tp {tp}: use --tp {divisors(heads, groups, ffn)}",
    )
    require(
        groups % tp == 0,
        f"--num-query-groups {groups} (key/value heads) does not divide by --tp {tp}: "
        f"use --tp {divisors(heads, groups, ffn)}",
    )
    shared = ("--moe-shared-expert-intermediate-size", model.shared_ffn_size)
    for flag, size in (("--ffn-hidden-size", ffn), ("--moe-ffn-hidden-size", model.mlp_size), shared):
        require(
            size % tp == 0,
            f"{flag} {size} does not divide by --tp {tp}: use {flag} {neighbours(size, tp)}, "
            f"or --tp {divisors(heads, groups, size)}",
        )
    require(
        model.vocab_size is None or model.vocab_size >= tp,
        f"--vocab-size {model.vocab_size} is below --tp {tp}, so some ranks would hold no token: "
        f"use --vocab-size {tp} or more, or a smaller --tp",
    )


def _check_sequence(config: RunConfig) -> None:
    """Zigzag context parallelism gives every cp rank two pieces; tp splits each between matrices."""
    seq_length, tp, cp = config.data.seq_length, config.parallel.tp, config.parallel.cp
    step = sequence_step(tp, cp)
    layout = f"--tp {tp}" if cp == 1 else f"2 x --cp {cp} x --tp {tp} = {step}"
    require(
        seq_length % step == 0,
        f"--seq-length {seq_length} does not divide by {layout}: use --seq-length {neighbours(seq_length, step)}",
    )


def _check_ulysses(config: RunConfig) -> None:
    parallel, model = config.parallel, config.model
    cp, tp, kind, size = parallel.cp, parallel.tp, parallel.cp_comm_type, parallel.cp_a2a_size
    heads, groups = model.num_attention_heads // tp, model.kv_heads // tp
    if kind == "a2a":
        for flag, count in (("--num-attention-heads", heads), ("--num-query-groups", groups)):
            require(
                count % cp == 0,
                f"--cp-comm-type a2a deals out heads, but {flag} {count * tp} / --tp {tp} = {count} does "
                f"not divide by --cp {cp}: use --cp {divisors(heads, groups)}, or --cp-comm-type a2a+p2p",
            )
    is_read = kind == "a2a+p2p"
    require_read(parallel, "cp_a2a_size", is_read, f"--cp-comm-type {kind}", "--cp-comm-type a2a+p2p")
    if size is None:
        return
    require(
        cp % size == 0,
        f"--cp-a2a-size {size} does not divide --cp {cp}: use {divisors(cp, heads, groups)}",
    )
    for flag, count in (("--num-attention-heads", heads), ("--num-query-groups", groups)):
        require(
            count % size == 0,
            f"{flag} {count * tp} / --tp {tp} = {count} does not divide by --cp-a2a-size {size}: "
            f"use --cp-a2a-size {divisors(cp, heads, groups)}",
        )


def _check_linear(config: RunConfig) -> None:
    """Heads of gated delta nets are split over tp, and exchanged over cp, along which a recurrence cannot be split."""
    model, tp, cp = config.model, config.parallel.tp, config.parallel.cp
    if LINEAR not in model.types_of_layers:
        return
    keys = model.linear_num_key_heads
    require(
        cp == 1 or config.parallel.cp_comm_type == "a2a",
        f"--cp-comm-type {config.parallel.cp_comm_type} splits the sequence, along which {LINEAR} layers carry a "
        "state: use --cp-comm-type a2a",
    )
    require(
        keys % (tp * cp) == 0,
        f"--linear-num-key-heads {keys} does not divide by --tp {tp} x --cp {cp} = {tp * cp}: use --tp and --cp whose "
        f"product is {divisors(keys)}",
    )


def _check_pipeline(config: RunConfig) -> None:
    layers, pp, vpp = config.model.num_layers, config.parallel.pp, config.parallel.vpp
    require(
        vpp == 1 or pp > 1,
        f"--vpp {vpp} interleaves pipeline stages, but --pp is {pp}: use --pp 2 or more, or --vpp 1",
    )
    order = config.parallel.gradient_accumulation_order
    require(
        order == "depth_first" or pp == 1,
        f"--gradient-accumulation-order {order} takes all microbatches through a layer before the next, but --pp is "
        f"{pp}, whose schedule is 1F1B: use --pp 1, or --gradient-accumulation-order depth_first",
    )
    stages = pp * vpp
    require(
        layers % stages == 0,
        f"--num-layers {layers} does not divide by --pp {pp} x --vpp {vpp} = {stages}: use --num-layers "
        f"{neighbours(layers, stages)}, or --pp and --vpp whose product is {divisors(layers)}",
    )


def check_batch(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError; the layout is known to fit the world size."""
    parallel, micro = config.parallel, config.training.micro_batch_size
    dp = data_parallel_size(config, world_size)
    batch, step = global_batch_size(config, world_size), micro * dp
    require(
        batch % step == 0,
        f"--global-batch-size {batch} does not divide by --micro-batch-size {micro} x dp {dp} = {step} "
        f"(dp = {world_size} ranks / (tp x cp x pp)): use --global-batch-size {neighbours(batch, step)}",
    )
    count = num_microbatches(config, world_size)
    require(
        parallel.vpp == 1 or count % parallel.pp == 0,
        f"--vpp {parallel.vpp} (interleaved 1F1B) needs a number of microbatches that divides by --pp "
        f"{parallel.pp}, but --global-batch-size {batch} / (--micro-batch-size {micro} x dp {dp}) = {count}: "
        f"use --global-batch-size {neighbours(batch, step * parallel.pp)}, or --vpp 1",
    )
