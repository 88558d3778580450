"""Files that other programs read: dense safetensors or torch state dicts, and ONNX with palettes."""

from pwfn.export.dense import Exactness, to_safetensors, to_torch
from pwfn.export.onnx import to_onnx

__all__ = ["Exactness", "to_onnx", "to_safetensors", "to_torch"]
