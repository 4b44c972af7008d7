"""NF4 matmul: the weight [out, in] stays in 4 bits and is decoded tile by tile; one schedule per kind of chip.

`layout` says in which order the kernels read codes. Nothing here quantises; see `riftco.ops`.
"""
