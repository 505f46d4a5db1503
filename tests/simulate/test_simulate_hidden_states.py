"""Hidden states in host memory, simulated: one more copy of a layer's input each way, and bytes on both sides."""

from dataclasses import replace

import pytest

from memo.config.derived import SLOT_TILES
from memo.search.candidates import Layout, Strategy, config_of
from memo.search.question import Question, ask
from memo.simulate.kernels import Kernels
from memo.simulate.layer import swapped_layer
from memo.simulate.model import step_model
from memo.simulate.swapping import choose, layer_times, modelled_problem
from memo.simulate.trace import simulate
from memo.spec.sweep import Sweep

SEQ_LEN, SECTIONS = 131072, 8
HIDDEN_BYTES = SEQ_LEN * 4096 * 2
"""bf16."""


@pytest.fixture(scope="module")
def question() -> Question:
    return ask("llama-3.1-8b", 1, seq_len=SEQ_LEN, global_batch_size=1, hardware="h100-80")


def test_copies_and_memory_grow_by_the_hidden_states(question: Question) -> None:
    found = []
    for on_host in (False, True):
        strategy = Strategy(0.0, sweep=Sweep(4 * SECTIONS, SLOT_TILES, hidden_on_host=on_host))
        config = config_of(question, Layout(), strategy)
        layer = swapped_layer(config, Kernels(question.hardware, "bf16"))
        problem = modelled_problem(config, 1, question.hardware, layer)
        solution = choose(problem, 0.0)
        found.append((problem, solution, layer_times(problem, solution, question.hardware)))
    (_, here, times), (problem, there, more) = found
    rates = question.hardware.offload_gb_per_s * 1e9, question.hardware.prefetch_gb_per_s * 1e9
    assert more.offload_s - times.offload_s == pytest.approx(HIDDEN_BYTES / rates[0])
    assert more.prefetch_s - times.prefetch_s == pytest.approx(HIDDEN_BYTES / rates[1])
    assert there.host_bytes - here.host_bytes == HIDDEN_BYTES * (SECTIONS - 1) // SECTIONS
    assert there.device_bytes - here.device_bytes == 3 * HIDDEN_BYTES // SECTIONS
    assert there.moved_bytes == here.moved_bytes  # by slots


def test_a_slow_link_shows_them(question: Question) -> None:
    """What is sure to be hidden without them is not any more."""
    strategy = Strategy(0.0, sweep=Sweep(4 * SECTIONS, SLOT_TILES, hidden_on_host=True))
    config = config_of(question, Layout(), strategy)
    layer = swapped_layer(config, Kernels(question.hardware, "bf16"))
    problem = modelled_problem(config, 1, question.hardware, layer)
    tiles = problem.uniform(0)
    gb_per_s = 1.05 * problem.moved_bytes(tiles) / problem.forward_s / 1e9
    hardware = replace(question.hardware, offload_gb_per_s=gb_per_s, prefetch_gb_per_s=gb_per_s)
    slow = modelled_problem(config, 1, hardware, layer)
    assert choose(slow, 0.0).exposed_s > 0
    assert choose(replace(slow, hidden=problem.hidden._replace(num_bytes=0)), 0.0).exposed_s == 0


def test_stages_meet_for_their_messages() -> None:
    """A message lasts as long as the slower of link and network, section by section, and both stages wait for it. Where
    messages take no time, 1F1B is as fast as with hidden states on GPUs."""
    question = ask("llama-3.1-8b", 4, seq_len=SEQ_LEN, global_batch_size=8, hardware="h100-80")
    found = []
    for on_host in (False, True):
        strategy = Strategy(0.0, sweep=Sweep(4 * SECTIONS, SLOT_TILES, hidden_on_host=on_host))
        found.append(step_model(config_of(question, Layout(pp=4), strategy), 4, question.hardware))
    beside, meeting = found
    hardware = question.hardware
    slowest = min(hardware.offload_gb_per_s, hardware.prefetch_gb_per_s) * 1e9
    assert meeting.message_s == pytest.approx(max(HIDDEN_BYTES / slowest, beside.message_s), rel=0.1)
    assert not beside.has_rendezvous and meeting.has_rendezvous
    times, states = beside.times, beside.states
    assert simulate(replace(meeting, times=times, states=states)).pipeline_s > simulate(beside).pipeline_s
    still = [replace(each, times=times, states=states, message_s=0.0) for each in found]
    assert simulate(still[1]).pipeline_s == pytest.approx(simulate(still[0]).pipeline_s, rel=1e-3)
