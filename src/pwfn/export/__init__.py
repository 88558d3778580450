"""Files for other programs: dense safetensors or torch state dicts, ONNX with palettes, torch programs."""

from pwfn.export.command import from_file
from pwfn.export.dense import Exactness, to_safetensors, to_torch
from pwfn.export.onnx import OnnxExport, to_onnx
from pwfn.export.pt2 import ProgramExport, to_pt2

__all__ = [
    "Exactness",
    "OnnxExport",
    "ProgramExport",
    "from_file",
    "to_onnx",
    "to_pt2",
    "to_safetensors",
    "to_torch",
]
