"""Misspelt settings and commands are named, and other people's variables are left alone."""

import os
import subprocess
import sys

import pytest
from support import REPO_ROOT, Project

from t5bench.plan.misspelt import settings_read_by, warnings_of_misspelt
from t5bench.plan.scripts import SCRIPTS
from t5bench.record.settings import BY_NAME

EVERY_SETTING = {*BY_NAME}.union(*({entry.name for entry in entries} for entries in SCRIPTS.values()))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TRAIN_ITER", "TRAIN_ITERS"),
        ("TRIAN_ITERS", "TRAIN_ITERS"),
        ("TRAINITERS", "TRAIN_ITERS"),
        ("train_iters", "TRAIN_ITERS"),
        ("GLOBAL_BATCH", "GLOBAL_BATCH_SIZE"),
        ("GLOBAL_BACTH_SIZE", "GLOBAL_BATCH_SIZE"),
        ("MICROBATCH_SIZE", "MICRO_BATCH_SIZE"),
        ("MICRO_BATCH_SIZES", "MICRO_BATCH_SIZE"),
        ("PRECISON_FLAG", "PRECISION_FLAG"),
        ("ENCODER_SEQ_LEN", "ENCODER_SEQ_LENGTH"),
        ("SAVE_INTERVALL", "SAVE_INTERVAL"),
        ("NPROC_PER_NODES", "NPROC_PER_NODE"),
        ("MEGATRON_DATADIR", "MEGATRON_DATA_DIR"),
        ("LR_WARMUP", "LR_WARMUP_ITERS"),
        ("DROPUOT", "DROPOUT"),
        ("RESMUE", "RESUME"),
        ("EVAL_ITER", "EVAL_ITERS"),
        ("lr", "LR"),
        ("Seed", "SEED"),
        ("hosts", "HOSTS"),
        ("TRAIN_ITERS ", "TRAIN_ITERS"),
        ("T5_TRAIN_ITERS", "TRAIN_ITERS"),
        ("MEGATRON_GLOBAL_BATCH_SIZE", "GLOBAL_BATCH_SIZE"),
        ("PRECISION", "PRECISION_FLAG"),
    ],
)
def test_a_near_miss_is_named(name: str, meant: str):
    (warning,) = warnings_of_misspelt({name: "5", "PATH": "/bin"}, settings_read_by(""))
    assert f"{name}='5'" in warning and warning.endswith(f"there is {meant}")
    # Who has set the setting knows its name, and means something else by the other.
    assert not warnings_of_misspelt({name: "5", meant: "6"}, settings_read_by(""))


@pytest.mark.parametrize(
    ("name", "meant"), [("REPEAT", "REPEATS"), ("STRATEGY", "STRATEGIES"), ("TRAIN_ITER", "TRAIN_ITERS")]
)
def test_a_near_miss_of_a_scripts_setting(name: str, meant: str):
    (warning,) = warnings_of_misspelt({name: "5"}, settings_read_by("run_megatron_t5_all"))
    assert warning.endswith(f"there is {meant}")


# What shells, schedulers, libraries and people have in their environments.
OTHERS = """
HOST HOSTNAME HOSTTYPE USER LOGNAME HOME PWD OLDPWD SHELL TERM LANG LC_ALL PATH DISPLAY EDITOR MAIL TMPDIR
SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_NNODES SLURM_NTASKS_PER_NODE SLURM_GPUS_PER_NODE SLURM_NODEID SLURM_PROCID
SLURM_CPUS_PER_TASK SLURM_MEM_PER_NODE SBATCH_PARTITION SLURMD_NODENAME SLURM_STEP_NUM_NODES PBS_NODEFILE LSB_HOSTS
NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_P2P_LEVEL NCCL_ALGO NCCL_PROTO NCCL_MIN_NCHANNELS NCCL_BUFFSIZE
GLOO_SOCKET_IFNAME UCX_TLS OMPI_COMM_WORLD_RANK PMI_RANK MPICH_GPU_SUPPORT_ENABLED FI_PROVIDER CUDA_HOME
CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING NVIDIA_VISIBLE_DEVICES NVIDIA_TF32_OVERRIDE
TORCH_DISTRIBUTED_DEBUG TORCH_NCCL_ASYNC_ERROR_HANDLING PYTORCH_CUDA_ALLOC_CONF TORCH_CUDA_ARCH_LIST
TORCH_EXTENSIONS_DIR WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NODE_RANK GROUP_RANK
OMP_NUM_THREADS MKL_NUM_THREADS HF_HOME HF_ENDPOINT HF_TOKEN HF_DATASETS_CACHE TRANSFORMERS_CACHE
TOKENIZERS_PARALLELISM XDG_CACHE_HOME DS_ACCELERATOR DS_SKIP_CUDA_CHECK DEEPSPEED_TIMEOUT MEGATRON_PATH
MEGATRON_LM_DIR APEX_DIR CONDA_PREFIX CONDA_DEFAULT_ENV VIRTUAL_ENV PYTHONPATH PYTHONUNBUFFERED PIP_CACHE_DIR
LD_LIBRARY_PATH CPATH BATCH_SIZE LEARNING_RATE NUM_EPOCHS EPOCHS MODEL MODEL_NAME MODEL_DIR DATA_DIR DATASET OUTPUT
OUT_DIR LOG_DIR LOG_LEVEL SEEDS DEVICES GPUS NUM_GPUS N_GPUS RUN_NAME RUN_ID EXPERIMENT EXP_NAME CHECKPOINT_DIR
CKPT_DIR SAVE_DIR RESULTS CONFIG http_proxy https_proxy no_proxy GIT_DIR SSH_AUTH_SOCK SSH_CONNECTION
KUBERNETES_SERVICE_HOST CI GITHUB_ACTIONS TEST_PROCESSES NIGHTLY RAY_ADDRESS JOB_NAME JOB_ID SGE_TASK_ID
MLFLOW_TRACKING_URI COMET_API_KEY LESS PAGER
"""


def test_other_peoples_variables_are_left_alone():
    import wandb.env

    names = [*OTHERS.split(), *os.environ, *(value for value in vars(wandb.env).values() if isinstance(value, str))]
    names += [f"MY_{name}" for name in EVERY_SETTING]
    for name in names:
        assert not warnings_of_misspelt({name: "5"}, EVERY_SETTING), name


def test_every_setting_itself_is_no_slip_of_another():
    for name in EVERY_SETTING:
        assert not warnings_of_misspelt({name: "5"}, EVERY_SETTING)


def test_a_launcher_and_what_starts_it_say_it_once(project: Project):
    said = project.launch("ddp", "--dry-run", TRAIN_ITER="5", GLOBAL_BATCH="8").stderr
    assert said.count("there is TRAIN_ITERS") == said.count("there is GLOBAL_BATCH_SIZE") == 1
    result = project.launch("all", "--dry-run", TRAIN_ITER="5", STRATEGIES="ddp zero1")
    assert result.stderr.count("there is TRAIN_ITERS") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("laoyuts", "no command 'laoyuts'\n       Did you mean layouts?"),
        ("compear", "no command 'compear'\n       Did you mean compare?"),
        ("prepare_data", "no command 'prepare_data'\n       Did you mean prepare-data?"),
        ("merg-data", "no command 'merg-data'\n       Did you mean merge-data?"),
        ("PLAN", "no command 'PLAN'\n       Did you mean layouts?"),
        ("train", "no command 'train'\n       python -m t5bench --help"),
        ("--hepl", "no option '--hepl'"),
        ("xyz", "no command 'xyz'\n       python -m t5bench --help"),
        ("prove nosuch", "no strategy 'nosuch'"),
        ("prove ddp zer2", "no strategy 'zer2'\n       Did you mean zero2?"),
        ("prove DDP", "no strategy 'DDP'\n       Did you mean ddp?"),
        ("predict zero2", "no run directory zero2\n       A launcher leaves its run in OUTPUT_DIR, outputs/<strategy>"),
        ("explain zero2", "no run directory zero2\n       A launcher leaves its run in OUTPUT_DIR, outputs/<strategy>"),
        ("compare zero2", "outputs/<strategy>"),
        ("prove 3d", "3d does not train t5"),
        ("sweep --runs-dir x --strategies nosuch", "no strategy 'nosuch'"),
        ("parity-check --engine native --runs-dir x nosuch", "no strategy 'nosuch'"),
        ("ledger --strategies nosuch", "no strategy 'nosuch'"),
        ("ranks nosuch", "python -m t5bench ranks --help"),
    ],
)
def test_what_is_unknown_is_called_unknown(words: str, said: str):
    command = [sys.executable, "-m", "t5bench", *words.split()]
    environment = os.environ | {"DROPOUT": "0", "SEED": "1"}
    result = subprocess.run(command, cwd=REPO_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and said in result.stderr, result.stderr
