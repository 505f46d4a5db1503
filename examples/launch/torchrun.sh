#!/usr/bin/env bash
# Several nodes with torchrun alone: run this on each of them, with the same FIRST_NODE.
#   FIRST_NODE=node1 bash examples/launch/torchrun.sh
# Remove the # of what your nodes need; weights and data are fetched once, on one of them:
# source /shared/memo/.venv/bin/activate # environment: where memo is installed
# export NCCL_SOCKET_IFNAME=eth0 # environment: the network that ranks talk over, where NCCL takes the wrong one
# [ -e /.dockerenv ] || exec docker run --gpus all --ipc host --network host --ulimit memlock=-1 -e FIRST_NODE -v /shared:/shared -v "$PWD":/work memo bash "$0" # container
# hf download meta-llama/Llama-3.1-8B --local-dir /shared/models/Llama-3.1-8B # weights
# memo data build texts.jsonl /shared/data/mine --tokenizer /shared/models/Llama-3.1-8B # data
set -euo pipefail

: "${FIRST_NODE:?give the host name of one of the nodes, the same one on all of them}"
NODES=${NODES:-2}
MODEL=${MODEL:-/shared/models/Llama-3.1-8B} # directory of Hugging Face, with its weights
DATA=${DATA:-/shared/data/mine}             # prefix that `memo data build` wrote
RUN=${RUN:-/shared/runs/llama-256k}         # a file system that all nodes see

# The fastest layout that fits these GPUs; takes a second, needs none of them, and says the same on every node.
PLAN=$(mktemp --suffix=.toml)
memo plan --model "$MODEL" --gpus $((8 * NODES)) --hardware h100-80 --host-memory-gib 1600 \
    --seq-len 262144 --gbs 16 --data-path "$DATA" --out "$PLAN"

# On SIGTERM the ranks save after the step they are in; torchrun would kill them after 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=900

# --load names the directory of --save, so the first start and every restart are one command.
# By default there is a checkpoint every 30 minutes, and the learning rate is one for given weights (--lr gives another).
exec torchrun --nnodes "$NODES" --nproc-per-node 8 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id llama-256k --rdzv-endpoint "$FIRST_NODE:29500" \
    -m memo train --config "$PLAN" --train-iters 1000 --save "$RUN" --load "$RUN" --keep-latest-k 2
