"""torchvision beside a torch without CUDA."""

from __future__ import annotations

import torch

_library: torch.library.Library | None = None


def ready_torchvision() -> None:
    """Declare two operators that torchvision's import expects, where its compiled part is missing.

    torchvision's wheels carry a compiled part for CUDA builds of torch. Beside a CPU build that
    part does not load, and its Python part, which is all that timm needs, then fails at import
    because ``torchvision::nms`` does not exist. Declaring the schemas lets it import; calling
    them still fails. Nothing is done where the compiled part is there or was declared before.
    """
    global _library
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
