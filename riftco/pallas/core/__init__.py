"""Tile maths in plain jnp, shared by every kernel: what is seen, the running softmax, NF4 codes."""
