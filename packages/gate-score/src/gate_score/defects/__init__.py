"""The list: importing this fills defect.DEFECTS, one module for each class of mistakes."""

from gate_score.defects import data, gradients, loss, norms, resume, updates

__all__ = ["data", "gradients", "loss", "norms", "resume", "updates"]
