# memo with all that it compiles on first use compiled ahead.
#
#   docker build -t memo .                                                          CPU
#   docker build -t memo --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .    GPU: CUDA's headers and compiler
#   docker run --gpus all --ipc host --ulimit memlock=-1 -v "$PWD":/work memo \
#       torchrun --nproc-per-node 8 -m memo train --model llama-3.1-8b --seq-len 128K --mock-data
#
# torch is the one that pip finds, which is CUDA's on x86-64; another with TORCH, from another index with
# PIP_INDEX_URL. Activations move through pinned host memory, hence memlock; NCCL talks through /dev/shm, hence ipc.
ARG BASE=debian:trixie-slim
FROM ${BASE}

# Triton compiles against Python's headers where it runs, and memo may build its allocator anew for a device.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes ca-certificates g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH="torch>=2.11"
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PATH=/opt/memo/bin:$PATH
# In a layer of its own: it is the largest by far, and changes least.
# hadolint ignore=DL3013
RUN python3 -m venv /opt/memo \
    && pip install --no-cache-dir "setuptools>=77" "${TORCH}"

COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE /src/
COPY memo /src/memo
COPY kernels /src/kernels
COPY csrc /src/csrc
# Without isolation, so that the allocator is built for the torch above.
RUN pip install --no-cache-dir --no-build-isolation "/src[report,tensorboard]"

RUN useradd --create-home --uid 10001 memo \
    && install --directory --owner memo /work
USER 10001
WORKDIR /work
CMD ["memo", "--help"]
