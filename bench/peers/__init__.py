"""Other servers beside Outrider, on one machine, asked the same."""
