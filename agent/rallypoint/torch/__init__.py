"""For PyTorch programs: code written for torch.distributed.elastic runs here unchanged.

Only the modules of this package import torch.
"""
