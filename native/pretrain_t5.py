"""Pretrains a T5; torchrun starts one of these per process. Takes Megatron-DeepSpeed's command line (--help)."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # As a script this file's own folder would come first, and its modules would hide others of the same names.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from native.train import main

    main()
