"""One operator call: the mode that sees it, the plan of what its kernel allocates, and the way to carry it out.

The input is a call of an operator; the output is tensors without data, whose memory was requested in the order of CUDA.
"""
