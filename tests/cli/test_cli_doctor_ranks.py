"""`memo doctor` of several ranks: which node is missing, which is slow, and what is wrong on another one."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from forked import ROOT, fork
from processes import by_hand, free_port

from memo.cli.doctor_checks import Finding
from memo.cli.doctor_ranks import (
    Node,
    Reduction,
    check_missing,
    elsewhere,
    expand_hosts,
    from_slurm,
    judged,
    nodes_of,
    reductions_of,
)
from memo.errors import EXIT_FAILED

SLURM = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
THREE = [Node("a", range(2)), Node("b", range(2, 4)), Node("c", range(4, 6))]
ALONE = [Node("node 0 of 2, counted from 0", range(1)), Node("node 1 of 2, counted from 0", range(1, 2))]
FAST = [100e9] * 3
"""Bytes a second within nodes, or between them."""


def test_hosts_of_slurm() -> None:
    assert expand_hosts("gpu[08-10,12],login1") == ["gpu08", "gpu09", "gpu10", "gpu12", "login1"]
    assert expand_hosts("rack1-node[1-2]-ib") == ["rack1-node1-ib", "rack1-node2-ib"]
    assert expand_hosts("") == []


def test_a_task_of_srun_is_a_rank() -> None:
    assert from_slurm(SLURM) == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu08",
        "MASTER_PORT": str(20000 + 16002 % 12768),
    }
    assert from_slurm({**SLURM, "WORLD_SIZE": "16"}) == {}  # torchrun has started it
    in_the_script = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert from_slurm(in_the_script) == from_slurm({}) == {}


def test_nodes_as_launchers_deal_out_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes_of(SLURM, 16) == [Node("gpu08", range(8)), Node("gpu09", range(8, 16))]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    launchers = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}  # srun torchrun: a task a node
    named = [Node("node 0 of 2, counted from 0", range(4)), Node("node 1 of 2, counted from 0", range(4, 8))]
    assert nodes_of(launchers, 8) == nodes_of({}, 8) == named


def test_the_missing_node_is_named() -> None:
    found = check_missing(THREE, {0: "a", 1: "a", 3: "b"}, "")
    assert found.state == "STOPS"
    assert found.found == "3 of 6 are missing: b (rank 2 of its 2); c (rank 4, 5 of its 2)"
    unknown = check_missing(ALONE, {0: "here"}, "")
    assert unknown.found == "1 of 2 are missing: node 1 of 2, counted from 0 (rank 1 of its 1)"
    assert check_missing([Node("a", range(1))], {0: "a"}, "they did not agree").found == "they did not agree"


def test_what_is_wrong_on_other_nodes_is_told_once() -> None:
    good, here = Finding("torch", "ok", "2.13.0"), Finding("GPUs", "note", "busy", "look")
    bad = Finding("host memory", "STOPS", "1 GiB free", "end other programs")
    told = [dataclasses.asdict(each) for each in (good, here, bad)]
    assert elsewhere({"b": told, "c": told, "d": told[:2]}, [good, here]) == [
        Finding("host memory on b, c", "STOPS", "1 GiB free", "end other programs")
    ]


def test_the_order_of_tests() -> None:
    assert [(test.kind, test.ranks) for test in reductions_of(THREE)] == [
        *[("within nodes", (0, 1)), ("within nodes", (2, 3)), ("within nodes", (4, 5))],
        *[("between nodes", (0, 2)), ("between nodes", (2, 4)), ("between nodes", (4, 0))],
        ("all ranks", (0, 1, 2, 3, 4, 5)),
    ]
    assert [test.kind for test in reductions_of(ALONE)] == ["between nodes", "all ranks"]
    assert reductions_of(THREE[:1]) == [
        Reduction("within nodes", (THREE[0],), (0, 1)),
        Reduction("all ranks", (THREE[0],), (0, 1)),
    ]


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ([*FAST, *FAST, 90e9], ["ok: 100 to 100 GB/s", "ok: 100 to 100 GB/s", "ok: 90 GB/s"]),
        ([100e9, 20e9, 100e9, *FAST, 20e9], ["note: 20 to 100 GB/s; slow: b", "ok: 100 to 100 GB/s", "ok: 20 GB/s"]),
        ([*FAST, 100e9, 9e9, 8e9, 9e9], ["ok: 100 to 100 GB/s", "note: 8 to 100 GB/s; slow: c", "ok: 9 GB/s"]),
        ([*FAST, 10e9, 100e9, 100e9, 9e9], ["ok: 100 to 100 GB/s", "note: 10 to 100 GB/s; slow: a, b", "ok: 9 GB/s"]),
        ([*FAST, 100e9], ["ok: 100 to 100 GB/s", "ok: 100 GB/s", "STOPS: the all-reduce of b and c does not end"]),
        ([100e9], ["ok: 100 GB/s", "STOPS: the all-reduce of b does not end"]),
        ([*FAST, *FAST], [*["ok: 100 to 100 GB/s"] * 2, "STOPS: the all-reduce of all ranks does not end"]),
    ],
    ids=["fast", "a node", "its card", "a cable", "a dead link", "a dead node", "never all"],
)
def test_the_slow_node_is_named(rates: list[float], says: list[str]) -> None:
    found = judged(reductions_of(THREE), rates, 1 << 20)
    assert [f"{each.state}: {each.found.removeprefix('all-reduce of 1.00 MiB: ')}" for each in found] == says
    assert all(bool(each.remedy) == (each.state != "ok") for each in found)


def findings(output: str) -> dict[str, dict[str, str]]:
    return {each["name"]: each for each in json.loads(output)}


def test_ranks_reduce_together_and_the_first_tells(tmp_path: Path) -> None:
    with by_hand(2, tmp_path, ("module", "memo"), ["doctor", "--json", "--save", str(tmp_path)]) as ranks:
        ends = ranks.ended(0), ranks.ended(1)
    assert [end.errors for end in ends] == ["", ""] and ranks.output(1) == "" and ends[1].status == 0
    found = findings(ranks.output(0))
    assert found["ranks"] == {"name": "ranks", "state": "ok", "found": "2 on 1 node", "remedy": ""}
    assert {found["within nodes"]["state"], found["all ranks"]["state"]} == {"ok"} and "between nodes" not in found
    assert found["all ranks"]["found"].startswith("all-reduce of 16.00 MiB: ")


def test_tasks_of_srun_meet_without_torchrun(tmp_path: Path) -> None:
    """Two names of this machine stand for two nodes."""
    job = {**SLURM, "SLURM_STEP_NODELIST": "localhost,127.0.0.1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    job |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(free_port() % 10000), "SLURM_LOCALID": "0"}
    inherited = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    processes = []
    for rank in range(2):
        own = {**inherited, **job, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "PYTHONPATH": str(ROOT)}
        files = tmp_path / f"output{rank}", tmp_path / f"errors{rank}"
        processes.append(fork("module", "memo", ["doctor", "--json"], own, *files))
    try:
        statuses = [process.wait(180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert statuses[1] == 0 and (tmp_path / "output1").read_text() == "", (tmp_path / "errors0").read_text()
    found = findings((tmp_path / "output0").read_text())
    assert found["ranks"]["found"] == "2 on 2 nodes" and found["between nodes"]["state"] == "ok"


def test_a_rank_that_does_not_come_stops_a_run(tmp_path: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    environment = {**os.environ, **alone, "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    files = tmp_path / "output", tmp_path / "errors"
    process = fork("module", "memo", ["doctor", "--json", "--wait-s", "2"], environment, *files)
    try:
        assert process.wait(180) == EXIT_FAILED, files[1].read_text()
    finally:
        process.kill()
    found = findings(files[0].read_text())
    assert found["ranks"]["found"] == "1 of 2 are missing: node 1 of 2, counted from 0 (rank 1 of its 1)"
