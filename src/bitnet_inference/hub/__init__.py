"""Models by name: what there is, what is here, and how the rest gets here. Only `pull` asks the network."""
