"""Inside the engine: two iterations of pretrain_t5.py in fp16, each with two seconds of evaluation and of saving after
it; `half_precision.py DIRECTORY`."""

import runpy
import sys
import time
from pathlib import Path

from megatron import training
from started_engine import set_arguments

DIRECTORY = Path(sys.argv[1])
training.evaluate_and_print_results = lambda *_args, **_kwargs: time.sleep(2)
training.save_checkpoint_and_time = lambda *_args, **_kwargs: time.sleep(2)
script = str(Path(training.__file__).parents[1] / "pretrain_t5.py")
watched = ["--eval-iters", "1", "--eval-interval", "1", "--save", str(DIRECTORY / "saved"), "--save-interval", "1"]
set_arguments(DIRECTORY / "data", *watched, "--exit-interval", "2", "--fp16", "--initial-loss-scale", "1024")
runpy.run_path(script, run_name="__main__")
