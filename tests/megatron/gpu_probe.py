"""pretrain_t5.py on a GPU that is not there: `gpu_probe.py DIRECTORY TOKENIZER [engine arguments]`.

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
from pathlib import Path
from types import ModuleType, SimpleNamespace

DIRECTORY, TOKENIZER, EXTRA = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "PYTORCH_JIT": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
CALLS: Counter[str] = Counter()
CHOSEN: dict[str, object] = {"devices": [], "architectures": []}
KERNELS = ("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda", "scaled_softmax_cuda")

sys.argv = ["engine_probes.py", "alone", str(DIRECTORY), TOKENIZER]
import engine_probes  # noqa: E402

os.environ["DS_ACCELERATOR"] = "cuda"
os.environ["LOCAL_RANK"] = os.environ["PROBE_LOCAL_RANK"]

# DeepSpeed and transformers look at what torch has when they are imported, and it has no stand-ins yet.
import deepspeed  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402, F401


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
        elif function is Tensor.copy_ and on_gpu(args[1]):
            return first
        if function is Tensor.pin_memory:
            return first
        return function(*map(placed, args), **{key: placed(value) for key, value in kwargs.items()})


def collective(name: str):
    """NCCL's: of one process, and of tensors on the GPU alone."""

    def call(*args, **kwargs):
        CALLS[name] += 1
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        assert all(map(on_gpu, tensors)), f"{name} was given a tensor on the host"

    return call


def softmax_kernel(name: str) -> ModuleType:
    """What the compiled extension takes: half precision, three dimensions for the causal one, else a mask of bools."""
    module = ModuleType(name)

    def check(*tensors: Tensor) -> None:
        assert all(map(on_gpu, tensors))
        assert {tensor.dtype for tensor in tensors} <= {torch.half, torch.bfloat16}

    def forward(inputs, *rest):
        CALLS[name] += 1
        check(inputs)
        assert inputs.dim() == (3 if "upper_triang" in name else 4)
        if name == "scaled_masked_softmax_cuda":
            assert on_gpu(rest[0])
            assert rest[0].dtype == torch.bool
        return torch.empty_like(inputs)

    def backward(gradients, results, _scale):
        CALLS[f"{name} backward"] += 1
        check(gradients, results)
        return torch.empty_like(gradients)

    module.forward, module.backward, module.get_batch_per_block = forward, backward, lambda *_: 4
    return module


def stand_in_for_cuda() -> None:
    generator = SimpleNamespace(set_state=lambda _: None, get_state=lambda: torch.zeros(16, dtype=torch.uint8))

    def nothing(*_args, **_kwargs):
        return None

    torch.cuda.default_generators = [generator]
    for name, answer in {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "memory_allocated": 0,
        "max_memory_allocated": 1 << 20,
        "memory_reserved": 0,
        "max_memory_reserved": 2 << 20,
    }.items():
        setattr(torch.cuda, name, lambda *_args, answer=answer, **_kwargs: answer)
    for name in (
        "synchronize",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "reset_peak_memory_stats",
        "_lazy_init",
    ):
        setattr(torch.cuda, name, nothing)
    torch.cuda.get_rng_state = lambda *_: generator.get_state()
    torch.cuda._lazy_call = lambda callback, **_: callback()
    torch.cuda.set_device = lambda device: CHOSEN["devices"].append(device)
    torch._C._jit_set_nvfuser_enabled = nothing


def stand_in_for_kernels() -> None:
    from torch.utils import cpp_extension

    # As with pybind11 3, what is loaded is handed back and not put where it can be imported.
    def load(name, extra_cuda_cflags, **_):
        CHOSEN["architectures"].append([flag for flag in extra_cuda_cflags if "sm_" in flag])
        return softmax_kernel(name)

    cpp_extension.load = load
    cpp_extension.CUDA_HOME = "/nonexistent"
    for name in ("torch.optim.optimizer", "torch.optim.adam", "torch.optim.adamw", "torch.utils._foreach_utils"):
        module = importlib.import_module(name)
        for kind in ("fused", "foreach"):
            if hasattr(module, f"_get_{kind}_kernels_supported_devices"):
                setattr(module, f"_get_{kind}_kernels_supported_devices", lambda: ["meta"])

    def fused_adamw(*lists, **_options):
        CALLS["fused AdamW"] += 1
        assert all(on_gpu(tensor) for tensors in lists for tensor in tensors)

    torch._fused_adamw_ = fused_adamw


def stand_in_for_nccl() -> None:
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    join = distributed.init_process_group

    def join_alone(backend, **_):
        CHOSEN["backend"] = backend
        join(backend="fake", store=FakeStore(), rank=0, world_size=1)

    distributed.init_process_group = join_alone
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor"):
        setattr(distributed, name, collective(name))

    def all_gather_object(gathered, mine):
        gathered[:] = [mine]

    distributed.all_gather_object = all_gather_object


def sizes_of(keys, data, **_):
    """The engine's own reads them back from a broadcast."""
    numbers = {key: data[key].numel() for key in keys}
    return {key: data[key].size() for key in keys}, numbers, sum(numbers.values())


def main() -> None:
    stand_in_for_cuda()
    stand_in_for_kernels()
    stand_in_for_nccl()

    from megatron import fused_kernels, training
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel import data

    fused_kernels._get_cuda_bare_metal_version = lambda _: ("", "13", "0")
    data._build_key_size_numel_dictionaries = sizes_of
    import pretrain_t5

    corpus = engine_probes.write_data(DIRECTORY / "gpu" / "text")
    arguments = [*engine_probes.ARGUMENTS, "--tokenizer-model", TOKENIZER, "--data-path", corpus, *EXTRA]
    sys.argv = ["pretrain_t5.py", *arguments, "--no-gradient-accumulation-fusion"]
    with Gpu():
        training.pretrain(
            pretrain_t5.train_valid_test_datasets_provider,
            pretrain_t5.model_provider,
            ModelType.encoder_and_decoder,
            pretrain_t5.forward_step,
            args_defaults={},
        )
        training.finish_training()
    found = {"calls": CALLS, "local_rank": os.environ["LOCAL_RANK"], "apex": "apex" in sys.modules} | CHOSEN
    (DIRECTORY / "gpu.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
