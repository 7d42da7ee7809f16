"""How fast a GPU runs operator calls, and how a real step is made of them.

Calls come from training steps that are followed on the virtual GPU; they are measured one by one, and steps as a whole.
"""
