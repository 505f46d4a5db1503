"""The import graph of memo/: no circle among files, lazy imports included, and few hops to the kernels."""

import graphlib

import grimp


def test_no_circle_and_few_hops() -> None:
    graph = grimp.build_graph("memo")
    # `memo` itself names Trainer and RunConfig lazily and is what everything lies in.
    modules = graph.modules - {"memo"}
    imports = {name: graph.find_modules_directly_imported_by(name) & modules for name in modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError that names the circle
    chain = graph.find_shortest_chain("memo.train.entry", "memo.attention.backends")
    assert chain is not None
    hops = len(chain)  # one more than its arrows: the example script comes first
    assert hops <= 6, chain
