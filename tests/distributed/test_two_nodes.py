"""Two torchrun agents on this machine, as on two nodes: they meet (c10d), and train as one process does.

fp64, three steps: losses within 1e-10; rank and world size come from the agents, LOCAL_RANK is 0 on both.
"""

import json
from pathlib import Path

from forked import own_store
from processes import agents

from memo import Trainer
from memo.config.flags import load_run

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61 --mock-data --seq-len 64 --gbs 4 "
    "--train-iters 3 --lr 1e-2 --dtype fp64 --device cpu --num-threads 1 --peak-tflops 1 --no-progress "
    "--offload-alpha off"
)
AGENT = (
    "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id two --local-addr localhost --rdzv-conf is_host=false"
)


def test_two_agents_train_as_one_process(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    store = own_store()  # so nobody else can take the port
    command = [*AGENT.split(), "--rdzv-endpoint", f"localhost:{store.port}"]
    command += ["-m", "memo", "train", *FLAGS.split(), "--log-jsonl", str(log)]
    with agents(tmp_path, [command] * 2) as nodes:
        one: list[float] = []
        with Trainer(config=load_run(FLAGS.split()), callbacks=[lambda record: one.append(record.lm_loss)]) as trainer:
            trainer.train()
        ends = [nodes.ended(node) for node in range(2)]
    assert [end.status for end in ends] == [0, 0], ends
    (first,) = filter(None, map(nodes.output, range(2)))  # rank 0 alone prints, whichever node it is on
    assert "layout: tp 1 x cp 1 (p2p) x pp 1 (x 1 chunks) x dp 2 on cpu" in first
    two = [record["lm_loss"] for record in map(json.loads, log.read_text().splitlines()) if "lm_loss" in record]
    assert len(one) == len(two) == 3
    difference = max(abs(a - b) for a, b in zip(one, two, strict=True))
    assert difference <= 1e-10, difference
