"""``python -m t5bench_ledger``, where the package is installed without its command."""

import sys

from t5bench_ledger.command import main

sys.exit(main())
