"""Settings and checks that matter on GPUs alone, planned on a machine without one."""

import pytest

from t5bench import Problem


@pytest.mark.parametrize(("value", "overlaps"), [("default", False), ("on", True), ("off", False)])
def test_overlapping_communication_is_a_setting(making, value: str, overlaps: bool):
    made = making("zero3", OVERLAP_COMM=value)
    assert made.plan.ds_config["zero_optimization"]["overlap_comm"] is overlaps
    assert made.plan.settings["OVERLAP_COMM"].role == "method" and made.plan.value("OVERLAP_COMM") == value
    assert ("have hung on GPUs" in made.said) == overlaps


@pytest.mark.parametrize(("given", "value"), [({}, "1"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "8")])
def test_the_users_number_of_hardware_queues_is_kept(making, given: dict, value: str):
    plan = making("ddp", **given).plan
    assert plan.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == value
    assert plan.settings["CUDA_DEVICE_MAX_CONNECTIONS"].role == "method"


def test_offloading_without_curand_is_refused_on_a_gpu(making, monkeypatch: pytest.MonkeyPatch):
    def lacking(environment: object) -> None:
        raise Problem("there is no cuRAND", "Install it")

    monkeypatch.setattr("t5bench.plan.engine.check_curand", lacking)
    for strategy, device, expected in (("zero3_offload", "cuda", True), ("zero3_offload", "cpu", False),
                                       ("zero3", "cuda", False)):  # fmt: skip
        assert ("no-curand" in making(strategy, DEVICE=device, NPROC_PER_NODE="1").codes) == expected


def test_a_flash_attn_that_cannot_be_imported_is_not_chosen(making, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("t5bench.plan.node_checks.installed_version", lambda name: "2.7.4")
    for fault, chosen in (("flash_attn cannot be imported: ImportError: undefined symbol", False), ("", True)):
        monkeypatch.setattr("t5bench.plan.node_checks.import_fault", lambda name, fault=fault: fault)
        made = making("ddp", DEVICE="cuda", NPROC_PER_NODE="1")
        assert ("--use-flash-attn-v2" in made.plan.arguments.words) == chosen
        assert fault in made.said
