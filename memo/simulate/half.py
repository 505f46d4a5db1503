"""The halves of a custom layer (memo.spec.custom_layer), before and after attention: their matrices, and the rest."""

from memo.simulate.layer_shape import LayerShape
from memo.spec.custom_layer import custom_facts
from memo.spec.shapes import layer_matrices
from memo.spec.weights import Weight


def matrices_of_half(shape: LayerShape, is_second: bool) -> dict[str, Weight]:
    """Return the matrices of a half.

    The half after attention has the row-parallel matrices and the matrices whose output the slot may keep."""
    model = shape.config.model
    recalled = {name for name, _ in custom_facts(model).recalled}
    return {
        module: weight
        for module, weight in layer_matrices(model).items()
        if (weight.split == "columns" or module in recalled) == is_second
    }


def rest_of_half_s(shape: LayerShape, is_second: bool) -> float:
    """Return the seconds of a half's operations that are no products with a matrix."""
    kernels = shape.kernels
    half = custom_facts(shape.config.model).bytes_of(kernels.narrow, kernels.hardware.device == "cuda")[is_second]
    of_matrices = sum(weight.rows for weight in matrices_of_half(shape, is_second).values()) * kernels.narrow
    num_bytes = 2 * max(0.0, half.made.per_token - of_matrices) * shape.tile_tokens / shape.tp.size
    return kernels.memory_s(num_bytes, 4)
