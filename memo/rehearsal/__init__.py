"""Rehearses a run without its GPUs: runs steps of one of its ranks on the emulated GPU (memo.emulated_gpu), in a
process of its own (memo.rehearsal.child), and reports the result. Only that process imports torch.
"""
