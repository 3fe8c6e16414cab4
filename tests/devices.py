"""Where tests of kernels keep their tensors, and how close results must be there.

Random numbers are drawn on the CPU, so that they are the same everywhere.
"""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# float32 summed in another order; else PyTorch's own
CLOSE = {"atol": 2e-5, "rtol": 1e-5} if DEVICE == "cuda" else {}
