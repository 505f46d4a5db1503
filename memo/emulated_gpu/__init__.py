"""An emulated NVIDIA GPU: the unchanged CUDA build of torch runs on a machine without a GPU.

csrc/emulated_gpu/README.md explains it. Only `face` imports torch, which loads it in a process that runs on the
emulated GPU. `build` and `launch` can be imported even if torch cannot, for lack of a GPU's libraries.
"""
