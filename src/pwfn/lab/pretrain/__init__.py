"""Training a network from scratch, for networks that have no published weights.

recipe = recipe_for("cifar_resnet18")
model = untrained("cifar_resnet18", recipe)
history = train(model, train_loader, test_loader, recipe, device="cuda")
"""

from pwfn.lab.pretrain.loop import Epoch, train, untrained
from pwfn.lab.pretrain.recipe import Recipe, recipe_for

__all__ = ["Epoch", "Recipe", "recipe_for", "train", "untrained"]
