"""A spec that `drmas_kernels.offline check` refuses, by itself."""

from tests.kernels.toy_kernels import CARELESS

SPECS = (CARELESS,)
