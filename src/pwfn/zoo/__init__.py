"""Networks and data sets by name; nothing else in pwfn imports timm or torchvision."""
