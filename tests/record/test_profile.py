"""PROFILE_ITERATION: which kernel is what, what the numbers say, and one iteration of a real run."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_runs import train

from t5bench.plan.launchers import ask
from t5bench.record import profile
from t5bench.record.profile import Span

NAMES = {
    # As PyTorch 2.x and CUDA's libraries name them on Hopper.
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": profile.MATMUL,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_"
    "cublas": profile.MATMUL,
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn>()": profile.MATMUL,
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64>>()": profile.ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)": profile.ATTENTION,
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int)": profile.NORM,
    "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16>(long)": profile.NORM,
    "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 9, false>()": profile.NORM,
    "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<c10::BFloat16, float>()": profile.NORM,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)": profile.ELEMENTWISE,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(...)": profile.ELEMENTWISE,
    "triton_poi_fused_add_gelu_3": profile.ELEMENTWISE,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor>()":
        profile.OPTIMIZER,
    "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(...)": profile.OPTIMIZER,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_31_64x128x64_4x1x1": profile.ATTENTION,
    "triton_poi_fused_add_mul_scaled_dot_product_attention_3": profile.ELEMENTWISE,
    "triton_tem_fused_addmm_gelu_4": profile.MATMUL,
    "void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float, float, 1024>": profile.OPTIMIZER,
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16>(...)": profile.EMBEDDING,
    "void at::native::embedding_backward_feature_kernel<c10::BFloat16, float, long>(...)": profile.EMBEDDING,
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>(...)": profile.EMBEDDING,
    "Memcpy DtoD (Device -> Device)": profile.COPY,
    "Memcpy HtoD (Pinned -> Device)": profile.COPY,
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": profile.COMMUNICATION,
    "a kernel of somebody's own": profile.OTHER,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_kernels_are_told_by_their_names(name: str, kind: str):
    assert profile.category(name) == kind


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), max_size=30))
def test_busy_time_is_the_number_of_moments_covered(intervals: list[tuple[int, int]]):
    covered = {moment for begin, length in intervals for moment in range(begin, begin + length)}
    assert profile.union([Span("k", begin, length) for begin, length in intervals]) == len(covered)


def test_a_profile_in_numbers():
    spans = [Span("nvjet_x", 0, 3000), Span("nvjet_x", 4000, 3000), Span("softmax_warp_forward", 8000, 1000)]
    content = profile.summary(spans, wall_ms=10, iteration=7, device="cuda")
    assert (content["busy_ms"], content["kernels"], content["iteration"]) == (7, 3, 7)
    assert content["by_category"] == {profile.MATMUL: 6, profile.NORM: 1}
    assert content["by_name"][0] == {"name": "nvjet_x", "category": profile.MATMUL, "count": 2, "ms": 6}


@pytest.mark.parametrize(
    ("spans", "sentence"),
    [
        ([Span("nvjet", 0, 4000)], "nothing to do 60%"),
        ([Span("nvjet", 0, 8000), Span("softmax", 8000, 1000)], "matrix products and attention, 89%"),
        ([Span("nvjet", 0, 3000), Span("elementwise", 3000, 6000)], "moves memory and does no matrix products, 67%"),
        ([], "nothing was profiled"),
    ],
)
def test_what_limits_an_iteration(spans: list[Span], sentence: str):
    assert sentence in profile.limits(profile.summary(spans, wall_ms=10, iteration=1, device="cuda"))


def test_of_a_trace_only_what_ran_on_the_gpu_counts():
    def event(category: str, name: str, start: float, length: float) -> dict:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}

    events = [
        event("kernel", "nvjet_a", 0, 1000),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 3000, 500),
        event("cuda_runtime", "cudaLaunchKernel", 0, 9000),
        event("gpu_user_annotation", "nccl:all_reduce", 0, 9000),
        {"ph": "M", "name": "process_name"},
    ]
    assert profile.device_spans({"traceEvents": events}) == [
        Span("nvjet_a", 0, 1000), Span("Memcpy DtoD (Device -> Device)", 3000, 500),
    ]  # fmt: skip


# ---- a profiled program ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["native", "megatron"])
def test_the_profiler_stands_before_the_engine(engine: str):
    environment = {"ENGINE": engine, "DEVICE": "cpu", "OUTPUT_DIR": "/run", "PYTHON": sys.executable}
    environment |= {"PROFILE_ITERATION": "9", "TRAIN_ITERS": "9"}
    command = " ".join(ask("ddp", environment=os.environ | environment).command)
    program = r"(-m native\.pretrain_t5|\S+/pretrain_t5\.py)"
    assert re.search(rf" -m t5bench\.run\.profile_step --iteration 9 --output /run/profile\.json {program} --", command)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_one_iteration_of_a_run(strategy: str, sample_data: Path, tmp_path: Path):
    """The matrix products tell that it is one iteration whole: DeepSpeed steps its optimizer at other times too."""
    settings = {"ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data), "TRAIN_ITERS": "4", "PRECISION_FLAG": ""}
    settings |= {"NPROC_PER_NODE": "1", "GLOBAL_BATCH_SIZE": "4", "MICRO_BATCH_SIZE": "2", "PROFILE_ITERATION": "3"}
    train(strategy, tmp_path / "run", **settings)
    content = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert (content["device"], content["iteration"]) == ("cpu", 3)
    assert content["by_category"][profile.MATMUL] > 0
    # Per layer 4 products forward in the encoder and 7 in the decoder (query and key-value are two in cross-attention),
    # and the head; backward has two for each. Two layers of each, two micro-batches.
    products = 3 * (2 * 4 + 2 * 7 + 1) * 2
    counts = {entry["name"]: entry["count"] for entry in content["by_name"]}
    assert counts["aten::mm"] + counts.get("aten::addmm", 0) == products
