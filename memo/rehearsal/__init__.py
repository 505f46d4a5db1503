"""Rehearses a run without its GPUs: runs steps of one of its ranks on the emulated GPU (memo.emulated_gpu), in a
process of its own, and reports the result.

    request    input of the process: the run as one of its ranks, and the machine         no torch
    rehearsed  its result                                                                 no torch
    waits      why a step may wait for the device                                         no torch
    start      starts the process                                                         no torch
    text       the result as text                                                         no torch
    child      what the process runs
    profile    the times of a layer, by which --offload-alpha auto decides
"""
