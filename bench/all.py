"""All benchmarks, their tables and pictures, and whether something got worse: `python bench/all.py --help`.

bench/README.md says what they measure; the work is done in bench/suite.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of bench/, whose file names would hide packages
    from bench.suite.runner import main

    sys.exit(main())
