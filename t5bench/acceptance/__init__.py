"""What scripts/gpu_acceptance.sh does: shows on a machine with GPUs that every strategy trains there, and how fast."""
