"""Files for other programs: dense safetensors or torch state dicts, and ONNX with palettes."""

from pwfn.export.command import from_file
from pwfn.export.dense import Exactness, to_safetensors, to_torch
from pwfn.export.onnx import OnnxExport, to_onnx

__all__ = ["Exactness", "OnnxExport", "from_file", "to_onnx", "to_safetensors", "to_torch"]
