"""Every bug that the patches mend has a test that fails without its fix: the files in inside/, run in the engine."""

import re
from pathlib import Path

import pytest
from inside_engine import INSIDE, run_inside


@pytest.mark.parametrize(("names", "processes"), [(["alone", "beside_native", "sizes"], 1), (["pair"], 2)])
def test_checks_inside_the_engine(
    megatron_dir: Path, sample_data: Path, tmp_path: Path, names: list[str], processes: int
):
    """Importing the engine takes seconds, so one process runs many tests; those that fail are named."""
    files = [str(INSIDE / f"{name}.py") for name in names]
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "rank {rank}")]
    options += ["--exitfirst"] if processes > 1 else []  # a process that failed would keep the other waiting
    data = {"SAMPLE_DATA": str(sample_data / "xsum_text_document"), "SHARED_DATA": str(tmp_path / "shared" / "text")}
    run_inside(megatron_dir, tmp_path, "-m", "pytest", *files, *options, processes=processes, **data)


def test_half_precision_training(megatron_dir: Path, tmp_path: Path):
    """The loss is scaled before gradients are unscaled, or the norm is 1024 times too small. Evaluation and saving are
    not iteration time. Peak memory is said after --exit-interval too, which ends training by sys.exit()."""
    (said,) = run_inside(megatron_dir, tmp_path, str(INSIDE / "half_precision.py"), str(tmp_path))
    lines = [line for line in said.splitlines() if "| lm loss: " in line]

    def numbers(name: str) -> list[float]:
        return [float(re.search(f"{name}: +(\\S+)", line)[1]) for line in lines]

    assert numbers("loss scale") == [1024.0] * 2
    assert all(0.2 < norm < 20 for norm in numbers("grad norm"))
    assert numbers(r"per iteration \(ms\)")[1] < 1900
    assert " | device cpu | allocated MiB 0.0 | reserved MiB 0.0 | host rss MiB " in said
    # The tokens of both sides are counted.
    assert numbers("consumed tokens") == [4 * (32 + 16), 2 * 4 * (32 + 16)]
    per_second = [number * (32 + 16) for number in numbers("samples per second")]
    assert numbers(r"\(tgs\)") == pytest.approx(per_second, rel=1e-2)
