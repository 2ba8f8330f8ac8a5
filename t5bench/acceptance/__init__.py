"""The Python part of scripts/gpu_acceptance.sh: checks on GPUs that every strategy trains, and measures its speed."""
