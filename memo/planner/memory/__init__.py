"""Addresses for memory requests known beforehand: offline dynamic storage allocation (MEMO paper, section 4.2).

trace_plan.py   an iteration in two levels (levels.py), or all       plan_check.py  replays it
                at once; iteration.py: requests and addresses
solve.py        one problem: bound, then greedy.py, skyline.py,      validator.py   re-checks it
                and mip.py, the paper's program through HiGHS
dsa.py          problem, solution, bound; overlaps.py: which blocks are alive together
minimalloc.py   problems and solutions as CSV
"""
