"""Counts what one iteration of ZeRO costs, without a clock: the same release counts the same every time.

The ledger's worker calls ``count_iteration`` before it trains a cell. In one late iteration, when DeepSpeed has learnt
in which order parameters are used, everything of this process is counted by the phase in which it happens:

- operators that PyTorch is asked to run, those that copy among them, and the bytes that these write,
- collectives by kind, with their bytes and the number of ranks,
- calls of Python functions of DeepSpeed, by function,

the memory that all tensors hold together after the iteration, and the most that they hold during it beyond what they
held before. What operators and libraries allocate for themselves is in neither.
"""

import gc
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PHASES = {"forward": "forward", "backward": "backward", "step": "update"}  # methods of DeepSpeed's engine
OTHER = "other"
COPIES = {"copy_", "_to_copy", "clone", "_foreach_copy_"}
# Fewer iterations are not enough: ZeRO-3 writes down the order of its modules in the first ones.
COUNTED = 5
# gloo's threads free the tensors of a collective, such as a norm, a moment later, and at another one in every run.
SMALLEST_FOLLOWED = 1024  # bytes


class LiveStorages:
    """The bytes of all storages that are alive, followed by weak references."""

    def __init__(self, smallest: int = 0) -> None:
        self._smallest = smallest  # in bytes; smaller ones are left out
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.bytes = 0
        self.peak = 0

    def see(self, values: Any) -> None:
        """Adds the storages of new tensors, and notices those that were resized."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._see(leaf.untyped_storage())

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            if storage.nbytes() < self._smallest:
                return
            # PyTorch keeps this object as long as the memory that it stands for.
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        size = storage.nbytes()
        self.bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.bytes)

    def _forget(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)
        del self._references[key]


class Counts(TorchDispatchMode):
    """What happens while it is active, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = OTHER
        self.operators: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.copied_bytes: Counter[str] = Counter()
        self.collectives: Counter[tuple[str, str, int, int]] = Counter()
        self.calls: Counter[str] = Counter()
        self.storages = LiveStorages(SMALLEST_FOLLOWED)
        self._held_before = 0
        self._root = str(Path(sys.modules["deepspeed"].__file__).parent)  # type: ignore[arg-type]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        if function.namespace == "c10d":
            self.collectives[self.phase, name.strip("_"), _ranks(args), _message_bytes(name, args)] += 1
            return function(*args, **(kwargs or {}))
        self.operators[self.phase] += 1
        result = function(*args, **(kwargs or {}))
        self.storages.see(result)
        if name in COPIES:
            self.copies[self.phase] += 1
            self.copied_bytes[self.phase] += _bytes(result)
        return result

    def begin(self) -> None:
        """To be called before the iteration."""
        for tensor in _tensors():
            self.storages.see([tensor, tensor.grad if tensor.is_leaf else None])
        self._held_before = self.storages.bytes

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """For sys.setprofile."""
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(self._root):
            path = file.removeprefix(self._root).lstrip("/")
            self.calls[f"{path}:{frame.f_code.co_name}"] += 1

    def to_json(self) -> dict[str, Any]:
        rows = [[*key, count] for key, count in sorted(self.collectives.items())]
        return {
            "operators": dict(self.operators),
            "copies": dict(self.copies),
            "copied_bytes": dict(self.copied_bytes),
            "collectives": [dict(zip(("phase", "kind", "ranks", "bytes", "count"), row, strict=True)) for row in rows],
            "deepspeed_calls": dict(sorted(self.calls.items())),
            "tensor_bytes": _held_bytes(),
            "peak_bytes": self.storages.peak - self._held_before,
        }


def _bytes(values: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _message_bytes(name: str, args: Any) -> int:
    """The bytes that a collective is about: of the whole tensor where it gathers or scatters the parts of one."""
    if not name.endswith("base_"):
        return _bytes(args)
    return max(_bytes(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor))


def _ranks(args: Any) -> int:
    for value in tree_leaves(args):
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value).size()
            except RuntimeError:  # a reduction's operator is such an object, too
                continue
    return 0


def _tensors() -> Iterator[Tensor]:
    """Those that Python can reach."""
    for found in gc.get_objects():
        if isinstance(found, Tensor) and not found.is_meta:
            yield found


def _held_bytes() -> int:
    """Of the storages of all tensors that Python can reach."""
    held = LiveStorages()
    for tensor in _tensors():
        held.see(tensor)
    return held.bytes


def count_iteration(path: Path) -> None:
    """Makes the trainer of this process count one of its iterations, and write it to the path as JSON."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    from native.zero import ZeroTrainer

    counts = Counts()
    begun = 0
    train = ZeroTrainer.forward_backward

    def in_phase(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, counts.phase = counts.phase, phase
            try:
                return method(*args, **kwargs)
            finally:
                counts.phase = before

        return wrapped

    for name, phase in PHASES.items():
        setattr(DeepSpeedEngine, name, in_phase(phase, getattr(DeepSpeedEngine, name)))

    @wraps(train)
    def counted(trainer: ZeroTrainer, micro_batches: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun != COUNTED:
            return train(trainer, micro_batches)
        gc.collect()
        counts.begin()
        gc.disable()  # a collection would call finalizers at another place each time
        sys.setprofile(counts.profile)
        try:
            with counts:
                return train(trainer, micro_batches)
        finally:
            sys.setprofile(None)
            gc.collect()
            path.write_text(json.dumps(counts.to_json()))
            gc.enable()

    ZeroTrainer.forward_backward = counted  # type: ignore[method-assign]
