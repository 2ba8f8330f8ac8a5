"""pretrain_t5.py on a GPU that is not there: `gpu.py DIRECTORY [engine arguments]`.

The GPU is PyTorch's meta device: its tensors have shapes and types but no memory, and PyTorch refuses to mix them with
the host's. Nothing is computed; what is seen is whether the engine's own code puts everything where it belongs, and
which of CUDA's functions and of NCCL's collectives it calls. The compiled softmax kernels and the driver are stand-ins.
What was called goes to DIRECTORY/gpu.json.
"""

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

# DeepSpeed and transformers look at what torch has when they are imported, and it has no stand-ins yet.
import deepspeed  # noqa: F401
import torch
import torch._dynamo
from started_engine import set_arguments
from torch import Tensor, distributed
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import cpp_extension
from transformers import AutoTokenizer  # noqa: F401

CALLS: Counter[str] = Counter()
CHOSEN: dict[str, object] = {"devices": [], "architectures": []}


def on_gpu(value) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def placed(value):
    """A device that is given to PyTorch: CUDA's is the meta device."""
    named = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return torch.device("meta") if named else value


def on_host(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def value_of(tensor: Tensor):
    """What is read from a tensor that holds nothing: no flag is set, a count is 1, a loss or norm 2."""
    if tensor.dtype == torch.bool:
        return False
    return 2.0 if tensor.dtype.is_floating_point else 1


READS = {
    Tensor.item: value_of,
    Tensor.__bool__: lambda tensor: False,
    Tensor.__float__: value_of,
    Tensor.__format__: lambda tensor, *_: "2.0",
    Tensor.tolist: lambda tensor: on_host(tensor).tolist(),
    Tensor.cpu: on_host,
}


class Gpu(TorchFunctionMode):
    """Sends what is meant for CUDA to the meta device, and answers what is read from there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if on_gpu(first):
            if function in READS:
                return READS[function](first)
            if function is Tensor.to and "cpu" in map(str, (*args[1:], *kwargs.values())):
                return on_host(first)
            if function is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
                return first.reshape(-1)
        elif function is Tensor.pin_memory or (function is Tensor.copy_ and on_gpu(args[1])):
            return first
        return function(*map(placed, args), **{key: placed(value) for key, value in kwargs.items()})


def gpu_only(name: str) -> Callable[..., None]:
    """One of NCCL's collectives, for one process; it takes only tensors on the GPU."""

    def call(*args, **kwargs):
        CALLS[name] += 1
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        assert all(map(on_gpu, tensors)), f"{name} was given a tensor on the host"

    return call


def softmax_kernel(name: str) -> ModuleType:
    """What the compiled extension takes: half precision, three dimensions for the causal one, else a mask of bools."""

    def run(suffix: str, *tensors: Tensor) -> Tensor:
        CALLS[name + suffix] += 1
        assert all(map(on_gpu, tensors))
        assert {tensor.dtype for tensor in tensors} <= {torch.half, torch.bfloat16}
        return torch.empty_like(tensors[0])

    def forward(inputs, *rest):
        assert inputs.dim() == (3 if "upper_triang" in name else 4)
        assert name != "scaled_masked_softmax_cuda" or (on_gpu(rest[0]) and rest[0].dtype == torch.bool)
        return run("", inputs)

    module = ModuleType(name)
    module.forward = forward
    module.get_batch_per_block = lambda *_: 4
    module.backward = lambda gradients, results, _scale: run(" backward", gradients, results)
    return module


def stand_in_for_cuda() -> None:
    generator = SimpleNamespace(set_state=lambda _: None, get_state=lambda: torch.zeros(16, dtype=torch.uint8))
    answers = dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True)
    answers |= {"is_current_stream_capturing": False, "device_count": 1, "current_device": 0}
    answers |= {"get_device_capability": (9, 0), "get_rng_state": generator.get_state()}
    answers |= {"memory_allocated": 0, "memory_reserved": 0}
    answers |= {"max_memory_allocated": 2**20, "max_memory_reserved": 2 * 2**20}
    answers |= dict.fromkeys(("synchronize", "empty_cache", "manual_seed", "manual_seed_all"))
    answers |= dict.fromkeys(("reset_peak_memory_stats", "_lazy_init"))
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_args, answer=answer, **_kwargs: answer)
    torch.cuda.default_generators = [generator]
    torch.cuda._lazy_call = lambda callback, **_: callback()
    torch.cuda.set_device = CHOSEN["devices"].append
    # A torch that is built with CUDA has this too, and would look for a driver.
    torch.accelerator.current_stream = lambda *_: SimpleNamespace(is_capturing=lambda: False)
    torch._C._jit_set_nvfuser_enabled = lambda *_: None


def stand_in_for_kernels() -> None:
    # As with pybind11 3, what is loaded is handed back and not put where it can be imported.
    def load(name, extra_cuda_cflags, **_):
        CHOSEN["architectures"].append([flag for flag in extra_cuda_cflags if "sm_" in flag])
        return softmax_kernel(name)

    def fused_adamw(*lists, **_options):
        gpu_only("fused AdamW")(*(tensor for tensors in lists for tensor in tensors))

    cpp_extension.load = load
    cpp_extension.CUDA_HOME = "/nonexistent"
    torch._fused_adamw_ = fused_adamw
    for name in ("torch.optim.optimizer", "torch.optim.adam", "torch.optim.adamw", "torch.utils._foreach_utils"):
        module = importlib.import_module(name)
        for function in ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices"):
            if hasattr(module, function):
                setattr(module, function, lambda: ["meta"])


def stand_in_for_nccl() -> None:
    join = distributed.init_process_group

    def join_alone(backend, **_):
        CHOSEN["backend"] = backend
        join(backend="fake", store=FakeStore(), rank=0, world_size=1)

    def all_gather_object(gathered, mine):
        gathered[:] = [mine]

    distributed.init_process_group = join_alone
    distributed.all_gather_object = all_gather_object
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor"):
        setattr(distributed, name, gpu_only(name))


def sizes_of(keys, data, **_):
    """The engine's own reads them back from a broadcast."""
    numbers = {key: data[key].numel() for key in keys}
    return {key: data[key].size() for key in keys}, numbers, sum(numbers.values())


def main(directory: Path, *arguments: str) -> None:
    stand_in_for_cuda()
    stand_in_for_kernels()
    stand_in_for_nccl()

    from megatron import fused_kernels, training
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel import data
    from pretrain_t5 import forward_step, model_provider, train_valid_test_datasets_provider

    fused_kernels._get_cuda_bare_metal_version = lambda _: ("", "13", "0")
    data._build_key_size_numel_dictionaries = sizes_of
    set_arguments(directory / "data", *arguments, "--no-gradient-accumulation-fusion")
    with Gpu():
        training.pretrain(
            train_valid_test_datasets_provider, model_provider, ModelType.encoder_and_decoder, forward_step,
            args_defaults={},
        )  # fmt: skip
        training.finish_training()
    found = {"calls": CALLS, "local_rank": os.environ["LOCAL_RANK"], "apex": "apex" in sys.modules} | CHOSEN
    (directory / "gpu.json").write_text(json.dumps(found))


main(Path(sys.argv[1]), *sys.argv[2:])
