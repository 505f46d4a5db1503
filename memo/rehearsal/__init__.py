"""Rehearses a run without its GPUs: steps of one of its ranks on the emulated GPU (memo.emulated_gpu), in a process of
its own, and the result for people.

    request    input of the process: the run as one rank of it, and the machine           no torch
    rehearsed  its result                                                                 no torch
    waits      why a step may wait for the device                                         no torch
    start      starts the process                                                         no torch
    text       the result as text                                                         no torch
    child      what the process runs
    profile    a layer's times in it, which decide what --offload-alpha auto moves
"""
