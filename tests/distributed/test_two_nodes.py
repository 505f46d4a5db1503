"""Two torchrun agents on this machine, as on two nodes: they meet (c10d), and train as one process does.

fp64, three steps: losses within 1e-10; rank and world size come from the agents, LOCAL_RANK is 0 on both.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from torch.distributed import TCPStore

from memo import Trainer
from memo.config.flags import load_run

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61 --mock-data --seq-len 64 --gbs 4 "
    "--train-iters 3 --lr 1e-2 --dtype fp64 --device cpu --num-threads 1 --peak-tflops 1 --no-progress "
    "--offload-alpha off"
)
AGENT = (
    "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id two --local-addr localhost "
    "--rdzv-conf is_host=false"
)


def test_two_agents_train_as_one_process(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # so nobody else can take the port
    command = [sys.executable, *AGENT.split(), "--rdzv-endpoint", f"localhost:{store.port}"]
    command += ["-m", "memo", "train", *FLAGS.split(), "--log-jsonl", str(log)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    nodes = [subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe) for _ in range(2)]
    try:
        one: list[float] = []
        with Trainer(config=load_run(FLAGS.split()), callbacks=[lambda record: one.append(record.lm_loss)]) as trainer:
            trainer.train()
        ends = [node.communicate(timeout=600) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], ends
    (first,) = [output for output, _ in ends if output]  # rank 0 alone prints, whichever node it is on
    assert "layout: tp 1 x cp 1 (p2p) x pp 1 (x 1 chunks) x dp 2 on cpu" in first
    two = [record["lm_loss"] for record in map(json.loads, log.read_text().splitlines()) if "lm_loss" in record]
    assert len(one) == len(two) == 3
    difference = max(abs(a - b) for a, b in zip(one, two, strict=True))
    assert difference <= 1e-10, difference
