"""Post-training: low-rank adapters, 4-bit bases, and merging one into the other."""

from riftco.models.adapters import Adapters
from riftco.models.packed import is_packed, with_layout
from riftco.tune.lora import lora_init
from riftco.tune.merging import LogitDifference, logit_difference, merge
from riftco.tune.quantization import MemoryReport, dequantize, memory_report, quantize

__all__ = [
    "Adapters",
    "LogitDifference",
    "MemoryReport",
    "dequantize",
    "is_packed",
    "logit_difference",
    "lora_init",
    "memory_report",
    "merge",
    "quantize",
    "with_layout",
]
