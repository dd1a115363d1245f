"""`python -m tools.packaging`."""

import sys

from tools.packaging.build import main

sys.exit(main())
