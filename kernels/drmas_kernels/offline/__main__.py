"""python -m drmas_kernels.offline"""

import sys

from drmas_kernels.offline.command import main

sys.exit(main())
