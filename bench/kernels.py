"""The kernels beside plain torch and other libraries, in one run: `python bench/kernels.py [--shapes NAME] [--op OP ...]`.

bench/README.md says how to run it and what it prints; the work is done in bench/kernel_bench.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of bench/, whose file names would hide packages
    from bench.kernel_bench.runner import main

    sys.exit(main())
