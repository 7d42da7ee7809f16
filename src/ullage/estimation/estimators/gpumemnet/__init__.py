"""GPUMemNet (Yousefzadeh-Asl-Miandoab et al.) as published: its features, its networks and its classes of memory.

Nothing of Ullage's own knowledge is used here. `ullage lab train gpumemnet` trains the networks.
"""
