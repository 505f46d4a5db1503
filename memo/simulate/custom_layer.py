"""What a custom layer (memo.spec.custom_layer) costs on one rank: its matrices one by one, attention, and its traffic.

Elementwise work is taken to write each tensor that the halves make, but for those of matrices, once and to read as
much. Each matrix gathers or scatters its tokens over tp, which overlaps with nothing. Known error: not compared with a
measurement. Of 512K tokens, memo's own layer written as a custom one takes 1 to 4 % longer in the simulator than as
memo's own, and up to 9 % under a swap plan (tests/simulate/test_simulate_custom_layer.py).
"""

from memo.simulate.cost import NOTHING, Cost
from memo.simulate.layer_model import LayerCost, LayerModel, attention_cost, swept_cost
from memo.spec.custom_layer import LayerFacts, custom_facts
from memo.spec.weights import Weight


def custom_cost(model: LayerModel, recompute_granularity: str = "none") -> LayerCost:
    """A custom layer under --recompute-granularity, or under a swap plan: `recompute` by group."""
    facts = custom_facts(model.config.model)
    first, second = (_half_s(model, facts, index) for index in (0, 1))
    matrices = [_forward(model, weight) for weight in _matrices(facts)]
    products = sum(matrices, NOTHING)
    attention = attention_cost(model, backward=False)
    forward = products + attention + Cost(elementwise=first + second)
    backward = sum((_backward(model, weight) for weight in _matrices(facts)), NOTHING)
    backward += attention_cost(model, backward=True) + Cost(elementwise=2 * (first + second))
    if not model.swaps:
        again = {"full": forward, "selective": attention}.get(recompute_granularity, NOTHING)
        return LayerCost(forward, backward + again)
    # Both halves run again; the products of what moved do not.
    of_name = {weight.name: cost for weight, cost in zip(_matrices(facts), matrices, strict=True)}
    recompute = {name: of_name.get(f"{name}.weight", NOTHING) for name, _ in facts.recalled}
    backward += products + Cost(elementwise=first + second) + sum(recompute.values(), NOTHING) * -1
    before = sum((cost for name, cost in of_name.items() if name not in _second(facts)), NOTHING)
    recompute["qkv"] = before + Cost(elementwise=first)
    if model.config.memory.sweeps:
        return swept_cost(model, forward, backward, recompute)
    copies = model.hidden_s(4, 2) + model.kernels.memory_s(2 * model.tokens * model.q * model.kernels.narrow)
    return LayerCost(forward + Cost(elementwise=copies), backward, recompute)


def _matrices(facts: LayerFacts) -> list[Weight]:
    return [weight for weight in facts.weights if weight.columns is not None]


def _second(facts: LayerFacts) -> set[str]:
    """Names of the matrices after attention: those that are recalled, and the row-parallel ones."""
    late = {weight.name for weight in _matrices(facts) if weight.split == "columns"}
    return late | {f"{name}.weight" for name, _ in facts.recalled}


def _sizes(model: LayerModel, weight: Weight) -> tuple[float, float]:
    """Outputs and inputs on one rank."""
    rows, columns = weight.local_shape(model.tp.size)
    return rows, columns


def _forward(model: LayerModel, weight: Weight) -> Cost:
    return Cost(matmul=model.product(*_sizes(model, weight)), tensor=model.gather_s())


def _backward(model: LayerModel, weight: Weight) -> Cost:
    rows, columns = _sizes(model, weight)
    return Cost(
        matmul=model.product(columns, rows) + model.weight_product(columns, rows),
        elementwise=model.weight_sum(rows, columns),
        tensor=2 * model.gather_s() if weight.split == "rows" else model.gather_s(),
    )


def _half_s(model: LayerModel, facts: LayerFacts, index: int) -> float:
    """Seconds of what is not a matrix in one half."""
    narrow, late = model.kernels.narrow, _second(facts)
    made = facts.bytes_of(narrow)[index].made.per_token
    own = [weight for weight in _matrices(facts) if (weight.name in late) == bool(index)]
    of_matrices = sum(weight.rows for weight in own) * narrow
    num_bytes = 2 * max(0.0, made - of_matrices) * model.tokens / model.tp.size
    return model.kernels.memory_s(num_bytes, 4 * model.tiles)
