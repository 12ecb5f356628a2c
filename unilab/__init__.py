"""Off-policy trainer for MuJoCo robots: physics on CPU cores, everything else on the accelerator."""

__version__ = "0.1.0"
