"""The paper's ImageNet networks, and the table of how long they take."""
