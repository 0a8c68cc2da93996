"""GPU memory of this process: tests that count it may then share a GPU with others."""

import os

import pynvml
import torch


def used_bytes() -> int:
    """Of the whole GPU where the driver does not tell processes apart."""
    torch.cuda.synchronize()
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
        if process.pid == os.getpid() and process.usedGpuMemory:
            return int(process.usedGpuMemory)
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
