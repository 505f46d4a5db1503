"""Peak of allocated memory of one rank on a CPU, in closed form: which tensors live together, and when.

    layers in flight | chunk's ends | one layer's forward or backward, tensor by tensor | messages | states

Everything here is arithmetic on sizes: nothing is run, and torch is not imported. Sources: the code that runs, whose
order of requests each file follows (memo.model, memo.executor, memo.parallel), and the kernels of torch 2.13 on CPU.
"""
