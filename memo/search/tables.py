"""A plan as text for people, and as an object for programs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from memo.config.model import CHOICES_OF_TRAINED
from memo.estimate.memory_errors import FULL_SIZE
from memo.estimate.rank_memory import components
from memo.estimate.time_errors import TIE_SHARE
from memo.estimate.verdict import TIGHT_BYTES, Verdict
from memo.search.axis import shortage_of
from memo.search.candidates import KEEP, Layout, config_of
from memo.search.costs import billion_tokens_s, durations, fused_kernels, pinning
from memo.search.longest import remedies
from memo.search.plan import Choice, Largest, Plan, Reason, cells_of, speed_error
from memo.search.question import Question
from memo.search.ranking import ENOUGH_SHARE, explain
from memo.spec.slots import slot_dims
from memo.text_table import text_table
from memo.units import GIB, format_count


class Commands(NamedTuple):
    """The command lines of the best choice and of the trial; None if there is nothing to run."""

    best: str | None = None
    trial: str | None = None


_NEAR_THE_LINE = "; by definition it is near the line of what fits"
_SPARE = ("TFLOP/s", "dp", "MFU %", "step s", "NVMe GiB", "host GiB", "$/B tokens", "±%")
"""Columns that a narrow terminal does not show; they are dropped in this order."""


def text(plan: Plan, commands: Commands, everything: bool = False, columns: int | None = None) -> str:
    """Return the ranked table, the plan to try first and the one that surely fits, their limits and commands, and the
    refused layouts.

    `columns`: most characters of a line of a table; None for any number.
    """
    question, trial = plan.question, plan.trial
    lines = [title(question), *([question.node_share_text] if question.node_share < 1.0 else [])]
    if plan.longest is not None:
        found = plan.longest
        lines.append(
            f"longest sequence that fits: {found.seq_len:,} tokens (in steps of {found.unit:,}){_NEAR_THE_LINE}"
        )
        lines.append(f"beyond it: {found.limit}")
    if plan.largest is not None:
        lines += _largest(plan.largest)
    if plan.choices:
        shown = plan.shown
        lines += ["", *_table(shown, question, columns, plan.ties()), *errors(plan, shown), ""]
        lines += [] if trial is None else [*_trial(plan, trial, commands), ""]
        lines += about_best(plan, commands)
    elif plan.longest is None and plan.largest is None:
        lines += ["", *_nothing(plan)]
    others = [choice for choice in plan.unsure if choice is not trial]
    if others:
        lines += ["", "would be faster, but may not fit:", *_table(others, question, columns)]
    return "\n".join([*lines, *_refused(plan, everything)])


def explanation(question: Question, layout: Layout, columns: int | None = None) -> str:
    """Return one layout under every strategy (time, memory by component and verdict), or why memo cannot run it.

    `columns`: most characters of a line of a table; None for any number.
    """
    why, tried = explain(question, layout)
    if why:
        return f"{layout}: {Reason.LAYOUT}: {why}"
    lines = [title(question), "", *_table(tried, question, columns)]
    for choice in tried:
        parts = {name: size for name, size in components(choice.sized.memory).items() if size and name != "host"}
        shown = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in parts.items())
        lines += ["", f"{choice.strategy}: GPU GiB: {shown}", f"  seconds of a step: {_seconds(choice)}"]
        if choice.sized.verdict != Verdict.FITS:
            lines.append(f"  {choice.sized.verdict}: {choice.sized.shortage(question)}")
    return "\n".join([*lines, *(["", question.foreseen_kernels] if question.foreseen_kernels else [])])


def as_object(plan: Plan, commands: Commands, everything: bool = False) -> dict[str, Any]:
    """Return the plan for JSON; sizes in GiB, times in seconds. Single `refusals` are listed only with `everything`."""
    question, model = plan.question, plan.question.model
    has_answer = plan.best is not None or plan.longest is not None or plan.largest is not None
    return {
        "model": model.name,
        "parameters": model.shape.parameters,
        "trained_parameters": model.shape.trained_parameters,
        "runnable": model.run is not None,
        "pretrained_checkpoint": model.pretrained,
        "has_weights": model.has_weights,
        "hardware": question.hardware.name,
        **_named(question, "gpus gpu_memory_gib host_memory_gib node_share seq_len global_batch_size"),
        **_named(question.hardware, "nvme_gib nvme_gb_per_s"),
        "dollars_per_gpu_hour": None if question.price is None else question.price.dollars_per_gpu_hour,
        "price": None if question.price is None else question.price.told,
        "foreseen_kernels": question.foreseen_kernels,
        "longest": plan.longest and plan.longest._asdict(),
        "largest": plan.largest and plan.largest._asdict(),
        "trial": None if plan.trial is None else _choice(plan.trial, question),
        "choices": [_choice(choice, question) for choice in plan.choices],
        "ties": len(plan.ties()),
        "unsure": [_choice(choice, question) for choice in plan.unsure],
        "refused": {str(reason): count for reason, count in plan.counts().items()},
        "refusals": [
            {name: str(value) for name, value in _named(refused, "layout reason text").items()}
            for refused in (plan.refusals if everything else ())
        ],
        **_named(plan, "num_candidates num_fitting"),
        "would_fit": [] if has_answer else remedies(question),
        "command": commands.best,
        "trial_command": commands.trial,
    }


def _named(thing: object, names: str) -> dict[str, Any]:
    """Return attributes of a thing by name; `names` with spaces between."""
    return {name: getattr(thing, name) for name in names.split()}


def _choice(choice: Choice, question: Question) -> Mapping[str, Any]:
    layout, strategy, step, sized = choice.layout, choice.strategy, choice.step, choice.sized
    error, at = speed_error(question, choice), strategy.placement
    parts = {name: size / GIB for name, size in components(sized.memory).items() if name != "host"}
    return {
        **layout._asdict(),
        "dp": question.gpus // layout.ranks,
        **_named(strategy, "alpha recompute order sharding"),
        "swept_tiles": strategy.sweep.tiles,
        "recompute_attention_layers": strategy.sweep.recompute_attention_layers,
        "hidden_states_in_host_memory": strategy.sweep.hidden_on_host,
        # Layers of a rank in host memory by kind of state, and all of its layers.
        "states_in_host_memory": at and _named(at, "optimizer gradients weights layers weight_copy"),
        "moved_tiles": choice.moved,
        "limit": choice.limit,
        "verdict": str(sized.verdict),
        "tight": sized.is_tight,
        "room_gib": sized.room_bytes / GIB,
        "total_gib": sized.memory.total / GIB,
        "host_gib": sized.host_bytes / GIB,
        "nvme_gib": sized.disk_bytes / GIB,
        "parts_gib": parts,
        "tgs_error_percent": 100 * error.share,
        "tgs_error_parts_percent": {name: 100 * share for name, share in error.shares.items()},
        **_named(step, "tgs mfu_percent tflops_per_gpu step_time_s bubble_share hidden_share seconds resources"),
        "binding_resource": step.binding,
        "dollars_per_billion_tokens": question.dollars(billion_tokens_s(question, step)),
    }


def _largest(found: Largest) -> list[str]:
    if not found.parameters:
        return ["not even the smallest model fits, or is fast enough", f"beyond it: {found.limit}"]
    more = found.unclipped_parameters - found.parameters
    why = "gradients need not wait in host memory for their norm"
    clipping = [f"--clip-grad 0 would add {format_count(more)}: {why}"] if more else []
    return [
        f"largest {found.family} that fits: {format_count(found.parameters)} parameters with masters in fp32 "
        f"({found.num_layers} layers, width {found.hidden_size:,}){_NEAR_THE_LINE}",
        f"beyond it: {found.limit}",
        *clipping,
    ]


def title(question: Question) -> str:
    """Return the question in one line."""
    hardware = question.hardware
    disk = f", NVMe {hardware.nvme_gib:,g} GiB at {hardware.nvme_gb_per_s:g} GB/s" if hardware.nvme_gib else ""
    return (
        f"{question.model.name}{_counts(question)} on {question.gpus} x {hardware.name} "
        f"({question.gpu_memory_gib:.4g} GiB, host {question.host_memory_gib:,g} GiB{disk} a node), "
        f"{question.seq_len:,} tokens x {question.global_batch_size} sequences"
    )


def _counts(question: Question) -> str:
    """Return the parameters of the model if not all of them compute each token, or if not all of them are trained."""
    shape, told = question.model.shape, ""
    if any(layer.nearest.num_experts for layer in shape.of_layers):
        told += f", {format_count(shape.active_parameters)} of them a token"
    if question.model.changes.keys() & set(CHOICES_OF_TRAINED):
        told += f", {format_count(shape.trained_parameters)} of them trained"
    return f" ({format_count(shape.parameters)} parameters{told})" if told else ""


def _table(
    choices: Sequence[Choice], question: Question, columns: int | None, ties: Collection[Choice] | None = None
) -> list[str]:
    rows = cells(choices, question, ties)
    spare = [rows[0].index(name) for name in _SPARE if name in rows[0]]
    left = {1, 3, len(rows[0]) - 1}
    return text_table(rows, left, columns=columns, spare=spare, wrapped=(3, 1)).splitlines()


def cells(
    choices: Sequence[Choice], question: Question, ties: Collection[Choice] | None = None
) -> list[tuple[str, ...]]:
    """Return the head and a row for each choice.

    Choices are ranked if `ties` is not None; two or more tied choices are marked with a =."""
    rows: list[tuple[str, ...]] = []
    for rank, choice in enumerate(choices, start=1):
        row = cells_of(question, choice)
        rows += [("", *row)] if not rows else []
        mark = "=" if ties is not None and len(ties) > 1 and choice in ties else ""
        rows.append(("" if ties is None else f"{rank}{mark}", *row.values()))
    return rows


def errors(plan: Plan, shown: Sequence[Choice]) -> list[str]:
    """The meaning of the marks in the table, the errors of speeds and of memory, and kernels that a run may replace."""
    ties, lines = plan.ties(), list[str]()
    best = "the best" if plan.trial is None else "the fastest that surely fits"
    if ties[1:]:
        lines.append(f"= less than {TIE_SHARE:.0%} slower than {best}: no forecast can tell these plans apart")
    if plan.trial is None and len(ties) > 1 and ties[0] is not min(ties, key=lambda choice: choice.step.step_time_s):
        lines.append(f"  the first leaves most GPU memory free (more than {ENOUGH_SHARE:.0%} of it does not count)")
    if any(choice.sized.is_tight for choice in shown):
        lines.append(f"tight: the plan fails if CUDA and NCCL take {TIGHT_BYTES / GIB:g} GiB more than foreseen")
    found = {str(speed_error(plan.question, choice)) for choice in shown}
    lines += [f"{each} (sources: memo hardware {plan.question.hardware.name})" for each in sorted(found)]
    return [*lines, str(FULL_SIZE), *filter(None, [plan.question.foreseen_kernels])]


def _trial(plan: Plan, trial: Choice, commands: Commands) -> list[str]:
    gain = plan.fastest_s / trial.step.step_time_s - 1.0
    lines = [
        f"try first: {trial.layout}: {_how(plan.question, trial)}",
        f"{gain:.1%} faster than what surely fits, but it may not fit: {trial.sized.shortage(plan.question)}; the "
        "first step tells",
    ]
    return lines if commands.trial is None else [*lines, f"run: {commands.trial}"]


def about_best(plan: Plan, commands: Commands) -> list[str]:
    """Return lines about the best choice: its method, limit, duration, price, weights and command."""
    best = plan.choices[0]
    name = "best" if plan.trial is None else "surely fits"
    lines = [f"{name}: {best.layout}: {_how(plan.question, best)}", *_states(best), f"binding limit: {best.limit}"]
    lines += [
        f"busiest: {_resources(best)}",
        f"seconds of a step: {_seconds(best)}",
        *durations(plan.question, best.step),
        *fused_kernels(plan.question, config_of(plan.question, best.layout, best.strategy), best.step, best.moved),
        *pinning(best.sized.host_bytes),
        *_room(plan, best),
    ]
    if commands.best is None:
        return [*lines, f"memo cannot train this model, only plan for it: {plan.question.model.why_not}"]
    return [*lines, plan.question.weights_text, f"run: {commands.best}"]


def _room(plan: Plan, best: Choice) -> list[str]:
    """Return lines about the GPU memory that no allocator shows, and about the room left in case it is larger."""
    question = plan.question
    config = config_of(question, best.layout, best.strategy)
    unseen = question.account.unseen(config, best.sized.memory)
    least, foreseen, most = (f"{size / GIB:.1f}" for size in unseen)
    tight = ": a tight plan, so take a shorter --seq-len to be safe" if best.sized.is_tight else ""
    return [
        f"CUDA, NCCL and page tables take {foreseen} GiB of a GPU beside torch (published figures: {least} to {most}); "
        f"{best.sized.room_bytes / GIB:.1f} GiB stay free{tight}"
    ]


def _how(question: Question, choice: Choice) -> str:
    """Return where a choice keeps its activations, or how it recomputes them."""
    if choice.strategy == KEEP:
        return "keep everything on the GPU: no swapping, no recomputation"
    config = config_of(question, choice.layout, choice.strategy)
    swept = choice.strategy.sweep
    sweep = f"--offload-granularity tile, {swept.tiles} tiles; " if swept.tiles else ""
    if again := swept.recompute_attention_layers:
        in_chunk = config.parallel.layers_per_chunk(config.model.num_layers)
        sweep += f"attention recomputed in {again} of {in_chunk} layers; "
    sweep += "hidden states in host memory; " if swept.hidden_on_host else ""
    if choice.moved is not None:
        tiles = slot_dims(config).tiles
        shares = ", ".join(f"{group} {count}/{tiles}" for group, count in choice.moved.items())
        always = "input, attention output, keys and values" if sweep else "input and attention output"
        return f"{sweep}--offload-alpha auto: {always} of each layer move to host memory, and {shares} of the tokens"
    if choice.strategy.swaps:
        return f"{sweep}--offload-alpha {choice.strategy.alpha}"
    if choice.strategy.recompute == "none":
        return "keep all activations on the GPU: no swapping, no recomputation"
    return f"--recompute-granularity {choice.strategy.recompute}"


def _states(choice: Choice) -> list[str]:
    """Return lines about the place of states, if they are not whole on the GPU."""
    at, sharding = choice.strategy.placement, choice.strategy.sharding
    if at is None:
        return []
    parts = []
    if sharding != "optim":
        what = "gradients" if sharding == "optim_grads" else "gradients and weights"
        parts.append(f"{what} of layers shared out over dp x cp")
    if at.optimizer:
        counts = f"optimizers of {at.optimizer}, gradients of {at.gradients} and weights of {at.weights}"
        source = (
            "" if not at.weights else (", streamed from a copy" if at.weight_copy else ", streamed from the masters")
        )
        parts.append(f"{counts} of {at.layers} layers in host memory{source}")
    lines = [f"states: {'; '.join(parts)}"]
    if choice.strategy.order == "breadth_first":
        lines.append("--gradient-accumulation-order breadth_first: all microbatches pass a layer before the next")
    return lines


def _resources(choice: Choice) -> str:
    """Return the share of the step for which each resource is busy, the busiest resource first."""
    total_s = choice.step.step_time_s
    ranked = sorted(choice.step.resources.items(), key=lambda item: item[1], reverse=True)
    return ", ".join(f"{name} {seconds / total_s:.0%}" for name, seconds in ranked if seconds >= 0.005 * total_s)


def _seconds(choice: Choice) -> str:
    shown = sorted(choice.step.seconds.items(), key=lambda item: item[1], reverse=True)
    total_s = choice.step.step_time_s
    return ", ".join(f"{name} {seconds:,.2f}" for name, seconds in shown if seconds >= 0.001 * total_s)


def _nothing(plan: Plan) -> list[str]:
    """Return why even the layout with the least memory does not fit, and which changes would fit."""
    found = remedies(plan.question)
    lines = ["nothing fits", f"nearest: {shortage_of(plan.question)}"]
    return [*lines, f"would fit: {', or '.join(found)}" if found else "nor would 64 times the GPUs or the host memory"]


def _refused(plan: Plan, everything: bool) -> list[str]:
    if not plan.refusals:
        return []
    counts = ", ".join(f"{count} {reason}" for reason, count in plan.counts().items())
    looked = f"looked at {plan.num_candidates:,} candidates, {plan.num_fitting:,} fit"
    if not everything:
        return ["", f"{looked}; layouts refused: {counts} (--all tells each reason, --explain LAYOUT one)"]
    return ["", f"{looked}; layouts refused: {counts}", *(f"  {r.layout}: {r.reason}: {r.text}" for r in plan.refusals)]
