"""Runs beside their predictions: what a record measured, and what it says of its machine."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

from t5bench import Problem
from t5bench.choose.asked import device_for, host_of, link_of, vocabulary_of
from t5bench.choose.calibration import Calibrated, MeasuredTime, calibrate
from t5bench.compare.comparable import gpu_names
from t5bench.compare.rows import Row, make_row
from t5bench.costmodel import time
from t5bench.costmodel.job import Job
from t5bench.costmodel.machine import Link, device_of
from t5bench.costmodel.prediction import Prediction, with_link
from t5bench.costmodel.time import CPU
from t5bench.record.records import load


def measured_row(directory: Path) -> Row:
    run = load(directory)
    return make_row("/".join(directory.resolve().parts[-2:]), [run])


def predicted_run(
    args: argparse.Namespace, row: Row, slower: float | None = None, link: Link | None = None
) -> Prediction:
    """The prediction for a run, which knows its vocabulary, GPU and batch. Raises Problem.

    slower: how much longer than its figures say the device takes; None: not at all, or unknown of a CPU.
    """
    plan = row.run.plan
    device = device_for(plan, args.device or gpu_names(row.run))
    vocabulary = row.run.padded_vocab_size or vocabulary_of(plan, args.vocabulary)
    job = Job.of_plan(plan, vocabulary, round(row.batch))
    if slower is None and device is not CPU:
        slower = 1.0
    between = link or link_of(args.network, args.link, args.latency)
    machine = with_link(device, between, job.parallel.devices_per_node, host_of(args.host))
    return Prediction.of_plan(plan, job, machine, slower, row.label)


@dataclass(frozen=True)
class Calibration:
    """What a measured run says of its machine."""

    run: Path
    slower: float
    """How many times as long computing takes as the device's own figures say, as far as they are known."""
    is_of_cpu: bool
    known: Calibrated | None = None
    """What runs on GPUs say of their hosts, too."""

    def applied(self, prediction: Prediction) -> Prediction:
        """The prediction on the machine as the runs show it; `slower` is part of it already."""
        if not self.known:
            return prediction
        return replace(prediction, machine=self.known.machine(prediction.machine), directions=self.known.directions)

    def check(self, predictions: Iterable[Prediction]) -> None:
        """Raises Problem where a prediction is for another kind of device."""
        if any((prediction.machine.device is CPU) != self.is_of_cpu for prediction in predictions):
            ran, other = ("CPUs", "GPUs") if self.is_of_cpu else ("GPUs", "CPUs")
            raise Problem(f"{self.run} ran on {ran}, which says nothing about {other}", "Calibrate with another run")


def calibration(args: argparse.Namespace) -> Calibration:
    """Raises Problem."""
    measured = [measured_time(args, path) for path in args.calibrate]
    first = args.calibrate[0]
    is_of_cpu = measured[0].machine.device is CPU
    try:
        if is_of_cpu:
            # A CPU's speed is unknown before, so a single factor says nearly all that there is.
            factors = [time.calibrated(run.job, run.machine, run.seconds, run.backend) for run in measured]
            return Calibration(first, geometric_mean(factors), is_of_cpu)
        known = calibrate(measured)
    except ValueError as error:
        found = f"{' '.join(map(str, args.calibrate))} was faster than its link allows: {error}"
        raise Problem(found, "Give its link's speed: --calibrate-link GBIT") from error
    return Calibration(first, known.slower, is_of_cpu, known)


def measured_time(args: argparse.Namespace, path: Path) -> MeasuredTime:
    """A run's time, and the machine that it ran on. Raises Problem."""
    row = measured_row(path)
    if not row.milliseconds:
        raise Problem(f"{path} has no measured iterations", "Calibrate with a complete run")
    is_known = not row.on_gpu or device_of(gpu_names(row.run) or "")
    of_the_run = argparse.Namespace(**vars(args) | {"device": "" if is_known else args.device})
    link = None
    if args.calibrate_network or args.calibrate_link:
        latency = None if args.calibrate_network else args.latency
        link = link_of(args.calibrate_network, args.calibrate_link, latency)
    prediction = predicted_run(of_the_run, row, link=link)
    return MeasuredTime(prediction.job, prediction.machine, row.milliseconds.median / 1000, prediction.backend)
