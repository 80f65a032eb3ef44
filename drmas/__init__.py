"""drmas: reinforcement learning for teams of LLM agents."""

import sys
from importlib.util import find_spec

__version__ = "0.1.0"

# A checkout puts a folder called `kernels` on sys.path; libraries that probe for the Hugging Face package of that name must
# see "not installed" rather than a namespace without a version.
_spec = find_spec("kernels") if "kernels" not in sys.modules else None
if _spec is not None and _spec.origin is None:
    sys.modules["kernels"] = None  # type: ignore[assignment]
del _spec
