"""Memory of one rank on a GPU: the executor's own layout, plans and a real layer say the same as the closed forms."""

import pytest
from golden import golden_rows

from memo.config import RunConfig, preset
from memo.estimate.calibration import CONTEXT_GIB, CONTEXT_SHARE, CP_GIB, STEP_BYTES
from memo.estimate.cases import read_case
from memo.estimate.node_memory import most_of_a_node, node_host_bytes
from memo.estimate.rank_memory import WHOLE_LOGIT_BYTES, components, layer_activation_bytes, rank_memory, worst_rank
from memo.estimate.swap_memory import swap_bytes
from memo.estimate.verdict import Verdict
from memo.search.estimating import answer, run_config
from memo.spec.shapes import shape_of
from memo.units import GIB


def run(name: str, **values: object) -> RunConfig:
    base = {"device": "cuda", "vocab_size": 1024, "params_dtype": "bf16", "offload_alpha": "off", "seq_length": 1024}
    return RunConfig(model=preset(name)).override({**base, **values})


def test_components_of_a_plain_run() -> None:
    """Llama 3.1 8B on 8 GPUs, tp 2, cp 2: every term by hand."""
    config = run("llama-3.1-8b", vocab_size=128256, tp=2, cp=2, seq_length=8192, gbs=2)
    shape = shape_of(config.model, "", 8192)
    memory = rank_memory(config, shape, 8, 0, logit_bytes=WHOLE_LOGIT_BYTES)
    replicated = 65 * 4096
    parameters = (8_030_261_248 - replicated) // 2 + replicated
    assert (memory.weights, memory.gradients) == (2 * parameters, 4 * parameters)
    assert memory.optimizer == 12 * parameters / 4
    assert memory.skeletal == 32 * layer_activation_bytes(config)
    assert memory.rounding_buffers == memory.host == 0
    hidden = 4096 * 4096 * 2
    assert memory.transient == 4 * hidden // 2 + 4096 * 128256 // 2 * 10
    assert memory.communication == pytest.approx(CP_GIB * GIB + STEP_BYTES * parameters / 4, abs=2)
    assert memory.context == pytest.approx(CONTEXT_GIB * GIB + CONTEXT_SHARE * memory.gradients, abs=1)
    parts = components(memory)
    assert memory.total == sum(parts.values()) - parts["host"]
    assert memory.total == memory.states + memory.activations + memory.communication + memory.context


def test_a_chunked_loss_takes_less_and_does_not_grow_with_the_sequence() -> None:
    config = run("llama-3.1-8b", vocab_size=128256, seq_length=32768)
    shape = shape_of(config.model, "", 32768)
    whole, chunked = (rank_memory(config, shape, 1, 0, logit_bytes=each) for each in (WHOLE_LOGIT_BYTES, None))
    assert whole.transient > 32768 * 128256 * 10
    assert chunked.transient < whole.transient / 3
    assert whole._replace(transient=0) == chunked._replace(transient=0)


def test_recomputation_keeps_less() -> None:
    base = {"seq_length": 8192, "num_layers": 8, "hidden_size": 512}
    shape = shape_of(run("gpt-tiny", **base).model, "", 8192)

    def kept(granularity: str) -> int:
        return rank_memory(run("gpt-tiny", **base, recompute_granularity=granularity), shape, 1, 0).skeletal

    assert kept("full") == 8 * 8192 * 512 * 2
    assert kept("none") - kept("selective") == 8 * 8192 * 4 * 4  # log-sum-exp of 4 heads, fp32
    full, none = (
        rank_memory(run("gpt-tiny", **base, recompute_granularity=granularity), shape, 1, 0)
        for granularity in ("full", "none")
    )
    assert full.transient > none.transient
    assert full.total < none.total


def test_stages_differ() -> None:
    config = run("llama-tiny", pp=4, gbs=8, num_layers=8, vocab_size=50257, seq_length=2048)
    shape = shape_of(config.model, "", 2048)
    stages = [rank_memory(config, shape, 4, stage) for stage in range(4)]
    layer = layer_activation_bytes(config)
    assert [stage.skeletal for stage in stages] == [2 * layer * flying for flying in (4, 3, 2, 1)]
    assert stages[0].weights > stages[1].weights == stages[2].weights < stages[3].weights
    assert worst_rank(config, shape, 4) in (stages[0], stages[3])
    assert worst_rank(config, shape, 4).total == max(stage.total for stage in stages)


def test_swapping_moves_activations_to_the_host() -> None:
    base = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 65536, "vocab_size": 50257}
    shape = shape_of(run("gpt-tiny", **base).model, "", 65536)
    plain = rank_memory(run("gpt-tiny", **base), shape, 1, 0)
    shares = [rank_memory(run("gpt-tiny", **base, offload_alpha=alpha), shape, 1, 0) for alpha in (0.0, 0.5, 1.0)]
    assert all(memory.total < plain.total and memory.skeletal == 0 for memory in shares)
    assert shares[0].host < shares[1].host < shares[2].host
    assert shares[0].rounding_buffers < shares[1].rounding_buffers < shares[2].rounding_buffers
    unit = 65536 * 1024 * 2
    lse = 65536 * 8 * 4
    assert [memory.host for memory in shares] == [6 * (2 * unit + lse), 6 * (6 * unit + lse), 6 * (10 * unit + lse)]


def test_host_memory_of_a_node_takes_the_most_demanding_stages() -> None:
    config = run("gpt-tiny", pp=2, num_layers=8, gbs=8, offload_alpha=1.0)
    first, last = (swap_bytes(config, 8, stage, 1.0).host for stage in (0, 1))
    assert first > last
    assert node_host_bytes(config, 8, 2, 1.0) == 2 * first
    assert node_host_bytes(config, 8, 6, 1.0) == 4 * first + 2 * last
    assert node_host_bytes(config, 8, 16, 1.0) == 4 * first + 4 * last


def test_a_node_is_filled_with_the_most_demanding_ranks_in_whatever_order_stages_come() -> None:
    """A middle stage may take most, for example where the last one is short of layers."""
    for ranks in ([1, 5, 3], [5, 3, 1], [3, 1, 5]):
        assert most_of_a_node(ranks, 2, 3) == 2 * 5 + 3
        assert most_of_a_node(ranks, 2, 8) == 2 * (5 + 3 + 1)


def test_hidden_states_between_stages_stay_on_the_device_under_a_swap_plan() -> None:
    """A chunk's input and output of each microbatch in flight: nobody moves what pipeline messages hold."""
    values = {"tp": 2, "pp": 4, "num_layers": 8, "gbs": 16, "offload_alpha": 1.0}
    config = run("llama-tiny", **values)
    shape = shape_of(config.model, "", 1024)
    hidden = 1024 * config.model.hidden_size * 2 // 2  # bf16, over tp
    stages = [rank_memory(config, shape, 8, stage).skeletal for stage in range(4)]
    assert stages == [2 * hidden * flying for flying in (4, 3, 2, 1)]
    assert rank_memory(run("llama-tiny", **{**values, "pp": 1}), shape, 2, 0).skeletal == 0


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_gradients_in_slots_leave_holes_like_those_that_stay(fraction: float) -> None:
    """The context grows with what gradients and slots take of the device, not with parameters."""
    states = {"offload_states": "all", "optimizer_offload_fraction": 1.0, "weight_offload_fraction": 0.0}
    config = run("gpt-tiny", num_layers=8, **states, gradient_offload_fraction=fraction)
    memory = rank_memory(config, shape_of(config.model, "", 1024), 1, 0)
    assert (memory.state_slots > 0) == (fraction > 0)
    holes = CONTEXT_SHARE * (memory.gradients + memory.state_slots)  # one rank has no stages among its slots
    assert memory.context == pytest.approx(CONTEXT_GIB * GIB + holes, abs=2)


MEMO_MODELS = {"7B": "gpt-7b", "13B": "gpt-13b", "30B": "gpt-30b", "65B": "gpt-65b"}


def memo_cells(row: dict[str, str], **more: str) -> dict[str, str]:
    length = str(int(row["seq_k"]) << 10)
    sizes = {name: row[name] for name in ("tp", "cp", "pp", "gpus")}
    return {**sizes, "model": MEMO_MODELS[row["model"]], "seq_len": length, "hardware": "a800-80", **more}


def test_what_memo_ran_fits() -> None:
    """Table 7, strategies and alphas as printed. One row cannot: 65B / tp 4 with fp32 gradients is 90 GiB of states."""
    rows = [row for row in golden_rows("memo_table7_memo") if row["status"] == "ok"]
    verdicts = {
        (row["model"], row["seq_k"]): answer(read_case(memo_cells(row, alpha=row["alpha"]), "t")).verdict
        for row in rows
    }
    assert [key for key, verdict in verdicts.items() if verdict != Verdict.FITS] == [("65B", "128")]


def test_what_megatron_ran_with_full_recomputation_fits() -> None:
    rows = [row for row in golden_rows("memo_table6_megatron") if row["status"] == "ok"]
    assert len(rows) == 19
    for row in rows:
        assert answer(read_case(memo_cells(row, recompute="full"), "t")).verdict == Verdict.FITS, row


def test_batches_fill_the_pipeline_unless_told() -> None:
    """Fewer microbatches than stages keep fewer activations, so a case that names none must not assume few."""
    cells = {"model": "llama-3.1-8b", "pp": "4", "gpus": "8", "hardware": "h100-94gb", "method": "megatron-lm"}
    named = answer(read_case({**cells, "global_batch_size": "1024"}, "t"))
    assert answer(read_case(cells, "t")).total_bytes == named.total_bytes
    assert answer(read_case({**cells, "global_batch_size": "2"}, "t")).total_bytes < named.total_bytes
    interleaved = run_config(read_case({**cells, "vpp": "2"}, "t"))
    assert interleaved.training.global_batch_size == 2 * 8
