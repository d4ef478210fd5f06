"""A plan -> rows: the node, the command and `make bench` measure with this and print the same rows."""
