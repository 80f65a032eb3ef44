"""The numerical kernels of drmas: plain functions on tensors, usable without the rest of the project.

One file per operation, each with the same parts in the same order: contract, reference, host side, registration, public
function; its Triton kernels stand in `_<operation>_triton.py`, imported where they run. Imports torch and Triton only, never
`drmas`. `backend.choose` says which implementation runs; `numerics` holds tolerances and cost formulas; `offline` compiles the
kernels without a GPU.
"""
