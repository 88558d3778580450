"""Few values to bytes and back: the compressed network and the .pwfn format."""
