"""Rules about spreading the model, the sequence and the batch over the ranks."""

from memo.config.check_fields import Condition, check_conditions
from memo.config.derived import global_batch_size, num_microbatches, sequence_step
from memo.config.layer_words import LINEAR
from memo.config.model import ModelConfig
from memo.config.require import divisors, neighbours, require, require_divides
from memo.config.run import RunConfig

_CONDITIONS: tuple[Condition, ...] = (
    (
        lambda c: c.model.vocab_size is None or c.model.vocab_size >= c.parallel.tp,
        "{vocab_size} is below {tp}, so some ranks would hold no token: give as many or more, or a smaller --tp",
    ),
    (
        lambda c: LINEAR not in c.model.types_of_layers or c.parallel.cp == 1 or c.parallel.cp_comm_type == "a2a",
        f"{{cp_comm_type}} splits the sequence, along which {LINEAR} layers carry a state: use --cp-comm-type a2a",
    ),
    (
        lambda c: c.parallel.vpp == 1 or c.parallel.pp > 1,
        "{vpp} interleaves pipeline stages, but with {pp} there is one: use --pp 2 or more, or --vpp 1",
    ),
    (
        lambda c: c.parallel.gradient_accumulation_order == "depth_first" or c.parallel.pp == 1,
        "{gradient_accumulation_order} takes all microbatches through a layer before the next, but {pp} has a schedule "
        "of 1F1B: use --pp 1, or --gradient-accumulation-order depth_first",
    ),
)


def check_layout(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError; sizes are known to be positive, heads to divide into query groups."""
    p = config.parallel
    need = p.model_ranks
    require(
        world_size % need == 0,
        f"{world_size} ranks (world size) cannot hold whole copies of the model: --tp {p.tp} x --cp {p.cp} x --pp "
        f"{p.pp} = {need}: start {neighbours(world_size, need)} ranks with torchrun, or choose --tp, --cp and --pp "
        f"whose product is {divisors(world_size)}",
    )
    _check_tensor(config.model, p.tp)
    _check_sequence(config)
    check_conditions(config, _CONDITIONS)
    layers, stages = config.model.num_layers, p.pp * p.vpp
    use = f"--num-layers {neighbours(layers, stages)}, or --pp and --vpp whose product is {divisors(layers)}"
    require_divides("--num-layers", layers, f"--pp {p.pp} x --vpp {p.vpp} = {stages}", stages, use)


def _check_tensor(model: ModelConfig, tp: int) -> None:
    heads, groups, ffn = model.num_attention_heads, model.kv_parts, model.ffn_size
    for flag, count in (("--num-attention-heads", heads), *_key_heads(model)):
        require_divides(flag, count, f"--tp {tp}", tp, f"--tp {divisors(heads, groups, ffn)}")
    for flag, size in (
        ("--ffn-hidden-size", ffn),
        ("--moe-ffn-hidden-size", model.mlp_size),
        ("--moe-shared-expert-intermediate-size", model.shared_ffn_size),
    ):
        use = f"{flag} {neighbours(size, tp)}, or --tp {divisors(heads, groups, size)}"
        require_divides(flag, size, f"--tp {tp}", tp, use)


def _key_heads(model: ModelConfig) -> list[tuple[str, int]]:
    """Flags and numbers of key/value heads that layers have."""
    of_full = ("--full-num-query-groups", model.full_num_query_groups)
    return [("--num-query-groups", model.kv_heads), *[of_full] * (model.full_num_query_groups > 0)]


def _check_sequence(config: RunConfig) -> None:
    """Zigzag context parallelism gives every cp rank two pieces; tp splits each between matrices. Ulysses deals out
    heads; so do gated delta nets, as their recurrence cannot be split along the sequence."""
    model, p, seq_length = config.model, config.parallel, config.data.seq_length
    cp, tp, kind, size = p.cp, p.tp, p.cp_comm_type, p.cp_a2a_size
    step, use = sequence_step(tp, cp), f"--seq-length {neighbours(seq_length, sequence_step(tp, cp))}"
    require_divides("--seq-length", seq_length, f"{piece(tp, cp)}{'' if cp == 1 else f' = {step}'}", step, use)
    heads, groups = model.num_attention_heads // tp, model.kv_parts // tp
    ways = {"a2a": ("--cp", cp), "a2a+p2p": ("--cp-a2a-size", size or 1)}
    instead = ", or --cp-comm-type " + ("all_gather" if config.memory.sweeps else "a2a+p2p")
    if kind in ways:
        flag, ranks = ways[kind]
        most = divisors(heads, groups) if kind == "a2a" else divisors(cp, heads, groups)
        require_divides("--cp", cp, f"{flag} {ranks}", ranks, f"{flag} {most}")
        for what, count in (("--num-attention-heads", model.num_attention_heads), *_key_heads(model)):
            use = f"{flag} {most}" + (instead if kind == "a2a" and LINEAR not in model.types_of_layers else "")
            of_rank = f"--cp-comm-type {kind} deals out heads, but {what} {count} / --tp {tp} ="
            require_divides(of_rank, count // tp, f"{flag} {ranks}", ranks, use)
    if LINEAR in model.types_of_layers:
        keys, use = model.linear_num_key_heads, f"--tp and --cp whose product is {divisors(model.linear_num_key_heads)}"
        require_divides("--linear-num-key-heads", keys, f"--tp {tp} x --cp {cp} = {tp * cp}", tp * cp, use)


def piece(tp: int, cp: int) -> str:
    """The factors of `sequence_step`, for messages."""
    return f"--tp {tp}" if cp == 1 else f"2 x --cp {cp} x --tp {tp}"


def check_batch(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError; the layout is known to fit the world size."""
    parallel, micro = config.parallel, config.training.micro_batch_size
    dp, batch = parallel.dp(world_size), global_batch_size(config, world_size)
    step, flag = micro * dp, "--global-batch-size"
    each = f"--micro-batch-size {micro} x dp {dp}"
    by = f"{each} = {step} (dp = {world_size} ranks / (tp x cp x pp))"
    require_divides(flag, batch, by, step, f"{flag} {neighbours(batch, step)}")
    count = num_microbatches(config, world_size)
    require(
        parallel.vpp == 1 or count % parallel.pp == 0,
        f"--vpp {parallel.vpp} (interleaved 1F1B) needs a number of microbatches that divides by --pp {parallel.pp}, "
        f"but {flag} {batch} / ({each}) = {count}: use {flag} {neighbours(batch, step * parallel.pp)}, or --vpp 1",
    )
