"""Exports a model of 150 MB in files of 10 MB; prints what memory the process took beyond the libraries, in MB.

python tests/tools/convert/export_memory.py EMPTY_DIRECTORY. Pages of the checkpoint's files do not count: the
kernel takes
them back when it needs memory.
"""

import json
import multiprocessing
import os
import re
import sys
import threading
from pathlib import Path

os.environ |= {"USE_TORCH": "1", "HF_HUB_OFFLINE": "1"}

import torch
from tools.convert.gpt_scores import make_gpt

from t5bench.__main__ import main


def memory() -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1000


class Peak(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.value = 0.0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.002):
            self.value = max(self.value, memory())


def make_run(directory: Path, **sizes: int) -> None:
    """A checkpoint of a GPT, in files of two tensor-parallel ranks."""
    directory.mkdir()
    (directory / "gpt").mkdir()
    make_gpt(directory / "gpt", **sizes)
    assert main(["import", str(directory / "gpt"), str(directory / "run"), "--tp", "2", "--precision", "fp32"]) == 0


def measure(directory: Path) -> dict[str, float]:
    large, small = directory / "large", directory / "small"
    # Another process, because this one would keep the memory.
    process = multiprocessing.get_context("fork").Process(
        target=make_run, args=(large,), kwargs={"n_embd": 512, "n_layer": 12}
    )
    process.start()
    process.join()
    make_run(small)
    assert main(["export", str(small / "run"), str(small / "export")]) == 0
    before = memory()
    peak = Peak()
    peak.start()
    assert main(["export", str(large / "run"), str(large / "export"), "--max-shard-size", "10MB"]) == 0
    peak.stop.set()
    peak.join()
    files = list((large / "export").glob("*.safetensors"))
    return {
        "model": sum(file.stat().st_size for file in files) / 1e6,
        "taken": peak.value - before,
        "files": len(files),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(Path(sys.argv[1]))))
