"""What a step costs beside its layers, by hand."""

from dataclasses import replace

import pytest

from memo.config import RunConfig, preset
from memo.estimate.hardware_files import HARDWARE
from memo.simulate.kernels import Kernels
from memo.simulate.outside_layers import embedding_cost, loss_cost, update_cost
from memo.spec.parameters import stage_parameters

IDEAL = Kernels(
    replace(
        HARDWARE["a800-80"],
        memory_gb_per_s=1000,
        node_gb_per_s=100,
        network_gb_per_s=10,
        efficiency=replace(
            HARDWARE["a800-80"].efficiency,
            matmul=1.0,
            matmul_half_size=0,
            memory=1.0,
            node=1.0,
            network=1.0,
            kernel_s=0,
            collective_s=0,
        ),
    ),
    "bf16",
)


def config(**values: object) -> RunConfig:
    base = {"seq_length": 65536, "offload_alpha": "off", "device": "cuda"}
    return RunConfig(model=preset("llama-3.1-8b")).override({**base, **values})


@pytest.mark.parametrize("layout", [{}, {"tp": 4}, {"cp": 2, "mbs": 2}])
def test_the_loss_multiplies_three_times_by_the_head(layout: dict[str, int]) -> None:
    """Logits and both gradients, all in backward: whatever the chunks, all tokens of the rank. To make logits again
    costs a product more, a gather and a norm."""
    run = config(**layout)
    tokens = 65536 * run.training.micro_batch_size // run.parallel.cp
    once_s = 2 * tokens * 128256 * 4096 / run.parallel.tp / 312e12
    for chunk in (4096, 8192):  # smaller ones are bound by memory, as the next test says
        cost, again = (loss_cost(run.override({"loss_chunk_size": chunk}), IDEAL, again) for again in (False, True))
        assert cost.backward.matmul == pytest.approx(3 * once_s, rel=0.001)
        hidden_s = tokens * 4096 * 2 / 100e9 * (run.parallel.tp - 1) / run.parallel.tp
        softmax_s = cost.backward.tensor - 2 * hidden_s
        assert cost.forward.total_s == 0.0 <= softmax_s < 0.01 * hidden_s + 1e-12
        assert again.forward.matmul == pytest.approx(once_s, rel=0.001)
        assert again.forward.total_s + again.backward.total_s - cost.backward.total_s == pytest.approx(
            once_s + hidden_s + 2 * tokens / run.parallel.tp * 4096 * 2 / 1e12, rel=0.001
        )


def test_a_chunk_adds_its_weight_gradient() -> None:
    """Fewer, larger chunks pass over the head's gradient less often: on CPUs 2 x (2 + 4) bytes an element each time; on
    GPUs 2 x 4 within the product, which small chunks cannot hide."""
    element_s = 128256 * 4096 / 1e12
    on_cpu = Kernels(replace(IDEAL.hardware, device="cpu"), "bf16")
    small, large = (loss_cost(config(loss_chunk_size=chunk), on_cpu).backward for chunk in (1024, 2048))
    assert small.elementwise - large.elementwise == pytest.approx(32 * 12 * element_s)
    for chunk, hides in ((512, False), (1024, False), (2048, True)):
        cost, plain = (loss_cost(config(loss_chunk_size=chunk), of).backward for of in (IDEAL, on_cpu))
        product_s = 2 * chunk * 128256 * 4096 / 312e12
        more_s = 65536 / chunk * max(0.0, 8 * element_s - product_s)
        assert cost.matmul - plain.matmul == pytest.approx(more_s) and hides == (more_s == 0.0)
        assert plain.elementwise - cost.elementwise == pytest.approx(65536 / chunk * 12 * element_s)


def test_each_chunk_is_normed_once_and_its_gradient_overwrites_it() -> None:
    """Beside logits and weights: two passes over the hidden states for the norm, three for its backward and two for the
    copy of the gradient."""
    for tp in (1, 4):
        run = config(tp=tp, loss_chunk_size=1024, vocab_size=256, kernels="triton")
        cost = loss_cost(run, IDEAL)
        pass_s = 65536 / tp * 4096 * 2 / 1e12
        rows = 256 / tp
        logits_s = 65536 * rows * 2 / 1e12
        assert cost.backward.elementwise - 3 * logits_s == pytest.approx(7 * pass_s)


def test_embedding_gathers_and_adds_into_its_whole_gradient() -> None:
    cost = embedding_cost(config(tp=4), IDEAL)
    assert cost.forward.matmul == 0.0
    assert cost.forward.tensor == pytest.approx(65536 * 4096 * 2 * 3 / 4 / 100e9)
    assert cost.backward.elementwise - cost.forward.elementwise == pytest.approx(128256 / 4 * 4096 * 12 / 1e12)


def test_adam_updates_a_shard() -> None:
    """Weight, gradient, moments: 28 bytes; gradients read for the norm, scaled; the weight cast: 14 more."""
    run = config(tp=4, cp=2)
    for ranks, shards in ((8, 2), (64, 16)):
        update = update_cost(run, IDEAL, ranks, stage=0)
        expected_s = stage_parameters(run, 0) / shards * (28 + 14) / 1e12
        assert update.optimizer_s == pytest.approx(expected_s, rel=0.001)


def test_moments_in_bf16_take_fewer_bytes_and_more_kernels() -> None:
    """Each is read and written in 2 bytes instead of 4; a piece of 1M elements takes AdamW and two copies of each."""
    run, narrow = config(tp=4), config(tp=4, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    slow = Kernels(replace(IDEAL.hardware, efficiency=replace(IDEAL.hardware.efficiency, kernel_s=1e-3)), "bf16")
    parameters = stage_parameters(run, 0)
    fewer, more = (
        update_cost(narrow, machine, 8, stage=0).optimizer_s - update_cost(run, machine, 8, stage=0).optimizer_s
        for machine in (IDEAL, slow)
    )
    assert fewer == pytest.approx(-8 * parameters / 2 / 1e12, rel=1e-6)
    assert more - fewer == pytest.approx(1e-3 * (5 * -(-parameters // 2 // 2**20) - 1), rel=1e-6)


def test_reduction_is_of_wide_gradients_and_gathering_of_narrow_weights() -> None:
    run = config(tp=4, cp=2)
    update = update_cost(run, IDEAL, 8, stage=0)
    parameters = stage_parameters(run, 0)
    assert 32 * update.bucket_s + update.rest_s == pytest.approx(parameters * 4 / 2 / 100e9)
    assert update.gather_s == pytest.approx(parameters * 2 / 2 / 100e9)
    # Over eight nodes each group has two members a node, and with them two parts of the network.
    spread = update_cost(run, IDEAL, 64, stage=0)
    assert spread.gather_s == pytest.approx(parameters * 2 * 15 / 16 / 20e9)


def test_one_rank_reduces_and_gathers_nothing() -> None:
    update = update_cost(config(), IDEAL, 1, stage=0)
    assert (update.bucket_s, update.rest_s, update.gather_s) == (0.0, 0.0, 0.0)
    assert update.optimizer_s > 0.0


def test_a_tied_matrix_is_added_up_between_first_and_last_stage() -> None:
    tied = config(pp=4, untie_embeddings_and_output_weights=False)
    first, middle, last = (update_cost(tied, IDEAL, 8, stage) for stage in (0, 1, 3))
    untied = [update_cost(config(pp=4), IDEAL, 8, stage) for stage in (0, 1, 3)]
    table_bytes = 128256 * 4096 * 4 / 2
    assert first.rest_s - untied[0].rest_s == pytest.approx(table_bytes / 100e9)  # all-reduce of two: once the bytes
    assert last.rest_s > untied[2].rest_s
    assert middle.rest_s == untied[1].rest_s


def test_replicated_gradients_are_summed_in_one_message_and_one_for_each_layer_that_leaves() -> None:
    hardware = replace(IDEAL.hardware, efficiency=replace(IDEAL.hardware.efficiency, collective_s=1.0))
    slow = Kernels(hardware, "bf16")
    for leaving, values in {0: {}, 32: {"offload_states": "all"}, 16: {"offload_states": "optimizer"}}.items():
        fraction = {"optimizer_offload_fraction": 0.5} if leaving == 16 else {}
        update = update_cost(config(tp=4, **values, **fraction), slow, 4, stage=0)
        assert update.replicas_s == pytest.approx(leaving + 1, rel=1e-3)
    assert update_cost(config(), slow, 4, stage=0).replicas_s == 0.0
