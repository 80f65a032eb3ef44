"""The numerical kernels of drmas: plain functions on tensors, usable without the rest of the project.

One file per operation, each with the same parts in the same order: contract, reference, host side, public function. Imports
torch only, never `drmas`. `backend.choose` says which implementation runs; `numerics` holds tolerances and cost formulas.
"""
