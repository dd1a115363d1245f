"""`python -m deploy.package`."""

import sys

from deploy.package.build import main

sys.exit(main())
