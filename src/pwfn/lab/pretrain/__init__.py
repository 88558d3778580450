"""Training a network from scratch, for those who have no weights to start from.

recipe = recipe_for("cifar_resnet18")
model = untrained("cifar_resnet18", recipe)
history = train(model, train_loader, test_loader, recipe, device="cuda")
save_weights(model, "resnet18.safetensors", {"top1": history[-1].top1, "recipe": recipe})
"""

from pwfn.lab.pretrain.augmentation import cutout
from pwfn.lab.pretrain.loop import Epoch, train, untrained
from pwfn.lab.pretrain.recipe import Optimizer, Recipe, recipe_for
from pwfn.lab.pretrain.saving import save_weights

__all__ = ["Epoch", "Optimizer", "Recipe", "cutout", "recipe_for", "save_weights", "train", "untrained"]
