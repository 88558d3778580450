"""Networks by name: our own for small images, any that timm has, and yours from a Python file.

model = create("cifar_resnet20")
notes = load_weights(model, "resnet20.safetensors")
config = data_config("cifar_resnet20", model, notes)        # how its images are prepared
"""

from pwfn.zoo.models.dataconfig import DataConfig, data_config
from pwfn.zoo.models.names import (
    INPUT_SHAPES,
    OWN,
    create,
    digits_resnet,
    input_shape,
    recorded,
    recorded_classes,
    timm_model,
)
from pwfn.zoo.models.resnet import (
    ProjectionBlock,
    ResidualBlock,
    ResNet18,
    SmallResNet,
    cifar_resnet18,
    cifar_resnet20,
    cifar_resnet56,
)
from pwfn.zoo.models.torchvision import ready_torchvision
from pwfn.zoo.models.vit import VisionTransformer, cifar_vit_tiny
from pwfn.zoo.models.weights import load_weights, noted_classes

__all__ = [
    "INPUT_SHAPES",
    "OWN",
    "DataConfig",
    "ProjectionBlock",
    "ResNet18",
    "ResidualBlock",
    "SmallResNet",
    "VisionTransformer",
    "cifar_resnet18",
    "cifar_resnet20",
    "cifar_resnet56",
    "cifar_vit_tiny",
    "create",
    "data_config",
    "digits_resnet",
    "input_shape",
    "load_weights",
    "noted_classes",
    "ready_torchvision",
    "recorded",
    "recorded_classes",
    "timm_model",
]
