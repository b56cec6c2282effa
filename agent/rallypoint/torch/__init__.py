"""PyTorch's side: what lets code written for torch.distributed.elastic run here as it is.

The modules in here import torch, and nothing else of Rallypoint does.
"""
