"""One operator call: the mode that sees it, the plan of what its kernel allocates, and the way to carry it out."""
