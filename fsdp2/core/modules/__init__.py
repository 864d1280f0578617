"""The user's modules and autograd: the only folder with side effects on them."""
