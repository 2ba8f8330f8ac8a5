"""Pretrains a GPT-2; torchrun starts one of these per process. Takes Megatron-DeepSpeed's command line (--help).

The launchers put the repository on PYTHONPATH.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # until everything is imported: see import_libraries
    from native.arguments import start
    from native.train import run

    start(run, "gpt")
