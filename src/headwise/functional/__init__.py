"""How alike heads are, as differentiable functions of tensors: what penalties, rules and measures are made of."""
