"""The one table of tolerances: the largest accepted error of an op against its twin, by dtype and class of op.

An error is the largest difference of any entry, relative to the larger of 1 and the largest entry of the twin's
array. The figures are a few times what is seen on CPU; the products leave room for a device's own order of summation.
"""

TOLERANCES: dict[tuple[str, str], float] = {
    # Elements are moved, never changed.
    ("float64", "exact"): 0.0,
    ("float32", "exact"): 0.0,
    ("bfloat16", "exact"): 0.0,
    # Elements are moved; their cotangents may be added.
    ("float64", "exact-sum"): 1e-15,
    ("float32", "exact-sum"): 1e-6,
    ("bfloat16", "exact-sum"): 1e-2,
    # One function of each element.
    ("float64", "elementwise"): 1e-13,
    ("float32", "elementwise"): 2e-6,
    ("bfloat16", "elementwise"): 2e-2,
    # Sums in the array's own dtype.
    ("float64", "reduction"): 1e-14,
    ("float32", "reduction"): 2e-6,
    ("bfloat16", "reduction"): 2e-2,
    # Softmax, its relatives, and normalisation layers.
    ("float64", "normalized"): 1e-13,
    ("float32", "normalized"): 5e-6,
    ("bfloat16", "normalized"): 3e-2,
    # Sums of products.
    ("float64", "product"): 1e-14,
    ("float32", "product"): 2e-6,
    ("bfloat16", "product"): 2e-2,
    # A product, then a loss.
    ("float64", "loss"): 1e-13,
    ("float32", "loss"): 5e-6,
    ("bfloat16", "loss"): 3e-2,
    # Two products with a softmax between them.
    ("float64", "attention"): 1e-13,
    ("float32", "attention"): 5e-6,
    ("bfloat16", "attention"): 3e-2,
}

DIFFERENCES: dict[int, float] = {1: 1e-6, 2: 1e-6}
"""Centred differences in float64 along random directions: of the value, and of the cotangents."""

MODULES: dict[str, float] = {"float64": 1e-12, "bfloat16": 6e-2}
"""Whole modules: the value against the twin, and the gradient in bfloat16 against the one in float64."""
