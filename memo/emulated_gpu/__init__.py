"""An emulated NVIDIA GPU: the CUDA build of torch runs, whole, on a machine without a GPU.

csrc/emulated_gpu/README.md says how. Nothing here imports torch but `face`, which torch itself loads in a process that
runs on the emulated GPU; where torch cannot be imported without a GPU's libraries, `build` and `launch` still can.
"""
