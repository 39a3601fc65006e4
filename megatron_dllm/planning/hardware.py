"""GPUs that can be planned for: what their data sheets promise, and how much of it a training run is taken to reach.

Peaks are dense (without structured sparsity), as printed:

    H100 SXM  NVIDIA H100 Tensor Core GPU datasheet (2023): bf16 1,979 and FP8 3,958 TFLOPS with sparsity, half of it
              dense; 80 GB, 3.35 TB/s; NVLink 900 GB/s, both directions together
    H200 SXM  NVIDIA H200 Tensor Core GPU datasheet (2024): as H100, but 141 GB at 4.8 TB/s
    B200      NVIDIA DGX B200 datasheet (2024), an eighth of: 72 PFLOPS FP8 with sparsity (dense half of that, bf16 a
              quarter), 1,440 GB, 64 TB/s, NVLink 14.4 TB/s, both directions together
    network   one 400 Gb/s InfiniBand port for each GPU (DGX H100, H200 and B200 datasheets: ConnectX-7)

Memory is in the data sheets' decimal GB. What torch reports of it is less: USABLE is the share left to a process.
"""

from dataclasses import dataclass

GB, TERA = 1e9, 1e12
USABLE = 0.97  # an H100 of 80 GB reports 79.1 GiB = 85 GB raw, and some of it is the driver's


@dataclass(frozen=True)
class Gpu:
    """bf16, fp8: peak FLOP/s; memory: bytes that a process can have; bandwidth: of memory, bytes/s; nvlink, network:
    bytes/s in one direction, within a node and to another one."""

    name: str
    bf16: float
    fp8: float
    memory: float
    bandwidth: float
    nvlink: float
    network: float = 50 * GB

    def peak(self, fp8: bool = False) -> float:
        return self.fp8 if fp8 else self.bf16


GPUS = {
    "h100": Gpu("H100 SXM 80 GB", 989 * TERA, 1979 * TERA, 80 * GB * USABLE, 3.35e12, 450 * GB),
    "h200": Gpu("H200 SXM 141 GB", 989 * TERA, 1979 * TERA, 141 * GB * USABLE, 4.8e12, 450 * GB),
    "b200": Gpu("B200 180 GB", 2250 * TERA, 4500 * TERA, 180 * GB * USABLE, 8.0e12, 900 * GB),
}


def recognise(device_name: str) -> Gpu | None:
    """The GPU of torch.cuda.get_device_name(); None: not one whose peak is known (an H100 PCIe has another one)."""
    words = device_name.lower().split()
    if "pcie" in words or "nvl" in words:
        return None
    return next((gpu for key, gpu in GPUS.items() if key in words), None)
