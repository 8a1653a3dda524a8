"""Updates of rules that need whole matrices: stacks of equal shape, and matrices that several ranks share."""
