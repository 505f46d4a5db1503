"""An emulated NVIDIA GPU: the unchanged CUDA build of torch runs on a machine without a GPU.

csrc/emulated_gpu/README.md explains it. torch loads only `face`, in a process that runs on the emulated GPU. `build`
and `launch` can be imported even if torch cannot be imported because a GPU's libraries are missing.
"""
