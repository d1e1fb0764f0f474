"""Training of draft heads: the frozen target, its data, the head, the loss and the export."""
