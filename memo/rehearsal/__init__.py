"""A run before its GPUs are there: steps of one of its ranks on the emulated GPU (memo.emulated_gpu), in a process of
its own, and what they say of the run.

    request    what a process is told: the run as one rank of it, and the machine         no torch
    rehearsed  what it tells                                                              no torch
    waits      why a step may wait for the device                                         no torch
    start      starts it                                                                  no torch
    text       what it told, for people                                                   no torch
    child      runs in it
    profile    a layer's times there, which decide what --offload-alpha auto moves
"""
