"""easymp's own parts: each file holds one feature of the training loop. `easymp.registry.PARTS` lists them."""
