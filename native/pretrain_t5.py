"""Pretrains a T5; torchrun starts one of these per process. Takes Megatron-DeepSpeed's command line (--help).

The launchers put the repository on PYTHONPATH.
"""

from native.train import main

if __name__ == "__main__":
    main()
