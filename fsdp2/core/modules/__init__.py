"""The user's modules, autograd and optimizers: the only folder with side effects on them."""
